"""The parts of torch, beside the accelerators' modules, that handle devices. Each file has a function ``patches()``."""
