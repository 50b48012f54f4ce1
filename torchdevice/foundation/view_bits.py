"""The conjugate and negative bits of tensors: views that torch computes when their values are read."""

from __future__ import annotations

import torch

conj = torch._C._VariableFunctions._conj
neg_view = torch._C._VariableFunctions._neg_view


def with_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that has no bits with those of another. A tensor like itself gives one without bits."""
    tensor = conj(tensor) if like.is_conj() else tensor
    return neg_view(tensor) if like.is_neg() else tensor
