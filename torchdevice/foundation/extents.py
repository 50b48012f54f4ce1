"""How far tensors with strides reach in memory."""

from __future__ import annotations

import torch


def extent(tensor: torch.Tensor) -> int:
    """Return how many elements there are in memory from the first to the last of a tensor's."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
