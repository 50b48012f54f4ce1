"""Process groups, collectives and distributed tensors, for ``torch/distributed``."""
