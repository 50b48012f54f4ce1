"""Normalizations of flash_attn: of a sum with a residual, after dropout.

They are computed in float32 or wider, and rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.thread_state import refuse
from torchdevice.packages.registry import (
    report,
    stands_in,
    unseen,
    wide_dtype,
    widened,
    without_autocast,
)


class Way(NamedTuple):
    """How rows are normalized.

    Attributes:
        eps: Added to the variance or to the mean square.
        is_rms: Whether rows are divided by the root of their mean square, without subtracting their
            mean.
        centered: Whether the weight is one less than the factor.
    """

    eps: float
    is_rms: bool
    centered: bool = False


def normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    way: Way,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return x with normalized rows: its last dimension, times the weight, plus the bias.

    Args:
        x: (..., size).
        weight: (size,).
        bias: (size,).
        way: How.
        dtype: The dtype of the result. Default: that of x.
    """
    rows, factor, added = widened(x, weight, bias)
    with unseen():
        size = rows.shape[-1:]
        computed = rows.dtype
        rounded = dtype or x.dtype
    if factor is not None and way.centered:
        factor = factor + 1
    with without_autocast(x):
        if not way.is_rms:
            rows = functional.layer_norm(rows, size, factor, added, way.eps)
        else:
            rows = functional.rms_norm(rows, size, factor, way.eps)
            rows = rows if added is None else rows + added
    return rows if rounded is computed else rows.to(rounded)


def dropped_out(
    x: torch.Tensor, probability: float, name: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return x after dropout, and which elements were kept; None where all were."""
    if not probability:
        return x, None
    report(name, "dropout with torch's random numbers", Fidelity.APPROXIMATE)
    kept = torch.rand_like(x, dtype=torch.float32) >= probability
    return x * kept / (1 - probability), kept


def summed(
    x: torch.Tensor, residual: torch.Tensor | None, rowscale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum with the residual, in float32 or wider."""
    wide = wide_dtype(x.dtype)
    total = x.to(wide)
    if rowscale is not None:
        total = total * rowscale.to(wide)[..., None]
    if residual is not None:
        total = total + residual.to(wide)
    return total


def residual_dtype(x: torch.Tensor, residual: torch.Tensor | None, in_float32: bool) -> torch.dtype:
    """Return the dtype of the sum of x and a residual; ``in_float32`` counts without one."""
    if residual is not None:
        return residual.dtype
    return wide_dtype(x.dtype) if in_float32 else x.dtype


def returned(found: torch.Tensor, *others: tuple[bool, Any]) -> Any:
    """Return a result alone, or with those of the other values that are asked for."""
    more = [value for asked, value in others if asked]
    return (found, *more) if more else found


# ---- flash_attn.ops.rms_norm and flash_attn.ops.layer_norm ---------------------------------------


@stands_in("flash_attn.ops.rms_norm.rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x divided by the root of the mean square of its last dimension, times the weight."""
    return normalized(x, weight, None, Way(epsilon, True))


@stands_in("flash_attn.ops.rms_norm.dropout_add_rms_norm")
def dropout_add_rms_norm(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: torch.Tensor | None = None,
    layerscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the RMS norm of dropped-out x0 plus a residual; with ``prenorm`` the sum too."""
    more = rowscale, layerscale, prenorm, residual_in_fp32, return_dropout_mask
    return _dropout_add(x0, residual, weight, bias, dropout_p, Way(epsilon, True), *more)


@stands_in("flash_attn.ops.layer_norm.dropout_add_layer_norm")
def dropout_add_layer_norm(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: torch.Tensor | None = None,
    layerscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the layer norm of dropped-out x0 plus a residual; with ``prenorm`` the sum too."""
    more = rowscale, layerscale, prenorm, residual_in_fp32, return_dropout_mask
    return _dropout_add(x0, residual, weight, bias, dropout_p, Way(epsilon, False), *more)


def _dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    way: Way,
    rowscale: torch.Tensor | None,
    layerscale: torch.Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
) -> Any:
    dropped, kept = dropped_out(x, dropout_p, "flash_attn.ops")
    if layerscale is not None:
        dropped = dropped * layerscale
    total = summed(dropped, residual, rowscale).to(residual_dtype(x, residual, residual_in_fp32))
    found = normalized(total, weight, bias, way, x.dtype)
    return returned(found, (prenorm, total), (return_dropout_mask, mask_of(x, kept)))


def mask_of(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Return a mask of the elements of x that were kept, as 0 and 1; all where there was no
    dropout.
    """
    return torch.ones_like(x, dtype=torch.uint8) if kept is None else kept.to(torch.uint8)


class Affine(nn.Module):
    """The weight and the bias of a normalization, and how they begin."""

    is_rms = False

    def __init__(self, hidden_size: int, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        if self.is_rms:
            bias = None
        else:
            bias = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _Normalizing(Affine):
    """The module of a normalization: of x, or of the sum of x after dropout and a residual."""

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(hidden_size, device, dtype)
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32

    def forward(self, x0: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        way, p = Way(self.eps, self.is_rms), self.p if self.training else 0.0
        more = None, None, self.prenorm, self.residual_in_fp32, False
        return _dropout_add(x0, residual, self.weight, self.bias, p, way, *more)


@stands_in("flash_attn.ops.rms_norm.DropoutAddRMSNorm")
class DropoutAddRMSNorm(_Normalizing):
    """The root mean square normalization of a sum with a residual, after dropout."""

    is_rms = True


@stands_in("flash_attn.ops.layer_norm.DropoutAddLayerNorm")
class DropoutAddLayerNorm(_Normalizing):
    """The layer normalization of a sum with a residual, after dropout."""


@stands_in("flash_attn.ops.rms_norm.RMSNorm")
class RMSNorm(nn.Module):
    """The root mean square normalization of the last dimension."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalized(x, self.weight, None, Way(self.eps, True))


# ---- flash_attn.ops.triton.layer_norm ------------------------------------------------------------


@stands_in("flash_attn.ops.triton.layer_norm.layer_norm_fn")
def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the norm of dropped-out x plus a residual; with ``prenorm`` the sum too."""
    if x1 is not None or weight1 is not None:
        name = "flash_attn.ops.triton.layer_norm.layer_norm_fn(x1=..., weight1=...)"
        refuse(name, "Add x1 to x first, and call it once for each weight.")
    if rowscale is not None:
        x = x * rowscale[..., None]
    way = Way(eps, is_rms_norm, zero_centered_weight)
    if residual is None and not prenorm and not dropout_p and not return_dropout_mask:
        return normalized(x, weight, bias, way)
    dropped, kept = dropped_out(x, dropout_p, "flash_attn.ops.triton.layer_norm")
    total = summed(dropped, residual).to(residual_dtype(x, residual, residual_in_fp32))
    found = normalized(total, weight, bias, way, x.dtype)
    return returned(found, (prenorm, total), (return_dropout_mask, kept))


@stands_in("flash_attn.ops.triton.layer_norm.rms_norm_fn")
def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the root mean square normalization of the sum of x, after dropout, and a residual."""
    more = (
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        zero_centered_weight,
        True,
        return_dropout_mask,
    )
    function: Any = layer_norm_fn
    return function.__wrapped__(x, weight, bias, residual, x1, weight1, bias1, *more)


@stands_in("flash_attn.ops.triton.layer_norm.RMSNorm")
class TritonRMSNorm(nn.Module):
    """The root mean square normalization of a sum with a residual."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.dropout_p = dropout_p
        self.zero_centered_weight = zero_centered_weight
        start = torch.zeros if zero_centered_weight else torch.ones
        self.weight = nn.Parameter(start(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        p = self.dropout_p if self.training else 0.0
        more = p, None, prenorm, residual_in_fp32, self.zero_centered_weight
        return rms_norm_fn(x, self.weight, None, residual, None, None, None, self.eps, *more)


TritonRMSNorm.__name__ = TritonRMSNorm.__qualname__ = "RMSNorm"
