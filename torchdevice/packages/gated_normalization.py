"""``mamba_ssm.ops.triton.layernorm_gated``: gated norms by groups of the last dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from torchdevice.packages.normalization import Affine, Way, normalized
from torchdevice.packages.registry import stands_in, wide_dtype

_MODULE = "mamba_ssm.ops.triton.layernorm_gated"


def gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    way: Way,
    group_size: int | None,
    norm_before_gate: bool,
) -> torch.Tensor:
    """Return ``norm(x) * silu(z)``, or without ``norm_before_gate`` ``norm(x * silu(z))``.

    Args:
        x: (..., size).
        weight: (size,).
        bias: (size,).
        z: As x.
        way: How rows are normalized.
        group_size: How many neighbours are normalized together; None for all.
        norm_before_gate: Whether the gate comes after the normalization.
    """
    wide = wide_dtype(x.dtype)
    rows = x.to(wide)
    gate = None if z is None else functional.silu(z.to(wide))
    if gate is not None and not norm_before_gate:
        rows = rows * gate
    # As groups, whose weights and biases come after.
    grouped = rows.unflatten(-1, (-1, group_size or x.shape[-1]))
    found = normalized(grouped, None, None, way).flatten(-2) * weight.to(wide)
    if bias is not None:
        found = found + bias.to(wide)
    if gate is not None and norm_before_gate:
        found = found * gate
    return found.to(x.dtype)


@stands_in(f"{_MODULE}.layernorm_fn")
def layernorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> torch.Tensor:
    """Return the layer normalization of x with a gate."""
    return gated(x, weight, bias, z, Way(eps, is_rms_norm), group_size, norm_before_gate)


@stands_in(f"{_MODULE}.rmsnorm_fn")
def rmsnorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """Return the root mean square normalization of x with a gate."""
    return gated(x, weight, bias, z, Way(eps, True), group_size, norm_before_gate)


class _Gated(Affine):
    """The module of a normalization with a gate."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, device, dtype)
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        way = Way(self.eps, self.is_rms)
        return gated(x, self.weight, self.bias, z, way, self.group_size, self.norm_before_gate)


@stands_in(f"{_MODULE}.LayerNorm")
class LayerNorm(_Gated):
    """The layer normalization with a gate."""


@stands_in(f"{_MODULE}.RMSNorm")
class RMSNorm(_Gated):
    """The root mean square normalization with a gate."""

    is_rms = True
