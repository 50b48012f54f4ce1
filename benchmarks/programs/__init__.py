"""Public programs written for CUDA, each at a commit, run unmodified where there is no CUDA."""
