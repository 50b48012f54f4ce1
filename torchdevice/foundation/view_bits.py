"""How tensors lie in memory: the conjugate and negative bits of views, and how far strides reach."""

from __future__ import annotations

import torch

conj = torch._C._VariableFunctions._conj
neg_view = torch._C._VariableFunctions._neg_view


def with_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that has no bits with those of another. A tensor like itself gives one without bits."""
    tensor = conj(tensor) if like.is_conj() else tensor
    return neg_view(tensor) if like.is_neg() else tensor


def extent(tensor: torch.Tensor) -> int:
    """Return how many elements there are in memory from the first to the last of a tensor's."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
