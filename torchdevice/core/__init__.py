"""The parts of a scope: its context, a thread's state, and the patches and supplied names of torch."""
