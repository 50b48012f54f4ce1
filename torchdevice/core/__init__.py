"""What a scope is to a thread: its context, its state, and the patches and supplied names of torch."""
