"""The other places of torch that speak of devices. Each file returns its patches from ``patches()``."""
