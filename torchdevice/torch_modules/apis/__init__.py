"""Other parts of torch that handle devices. Each file replaces some names of torch."""
