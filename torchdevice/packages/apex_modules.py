"""``apex.normalization``, and ``apex.amp``, which torch has taken over."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchdevice.packages.extension_refusals import check_norm, refuse_gradient_of_norm
from torchdevice.packages.normalization import Way, normalized
from torchdevice.packages.registry import in_autocast_dtype, refuses, stands_in, unseen

_MODULE = "apex.normalization.fused_layer_norm"


def _over(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    shape: Sequence[int],
    way: Way,
    is_mixed: bool = False,
    of_module: bool = False,
) -> torch.Tensor:
    """Return x normalized over its last dimensions, which have a shape.

    The result has the dtype of x; with ``is_mixed`` that of the weight.
    """
    if torch._C._is_any_autocast_enabled():
        x = in_autocast_dtype(x)
        weight, bias = (
            None if each is None else in_autocast_dtype(each) for each in (weight, bias)
        )
    check_norm(x, weight, bias, shape, is_rms=way.is_rms, is_mixed=is_mixed, of_module=of_module)
    with unseen():
        whole = x.shape
        dtype = x.dtype if weight is None or not is_mixed else weight.dtype
    if whole[len(whole) - len(shape) :] != tuple(shape):
        raise RuntimeError(
            f"x has the shape {tuple(whole)}, which does not end in "
            f"normalized_shape={tuple(shape)}."
        )
    rows = x
    if len(shape) > 1:
        rows = x.flatten(len(whole) - len(shape))
        weight, bias = (None if each is None else each.flatten() for each in (weight, bias))
    result = normalized(rows, weight, bias, way, dtype)
    if len(shape) > 1:
        result = result.reshape(whole)
    refuse_gradient_of_norm(result, x, is_rms=way.is_rms, of_module=of_module)
    return result


def _shape(given: Any) -> torch.Size:
    return torch.Size((int(given),) if isinstance(given, numbers.Integral) else tuple(given))


@stands_in(f"{_MODULE}.fused_layer_norm_affine")
def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return the layer normalization of the last dimensions, times a weight, plus a bias."""
    return _over(input, weight, bias, _shape(normalized_shape), Way(eps, False))


@stands_in(f"{_MODULE}.fused_layer_norm")
def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Return the layer normalization of the last dimensions."""
    return _over(input, None, None, _shape(normalized_shape), Way(eps, False))


@stands_in(f"{_MODULE}.fused_rms_norm_affine")
def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Return the root mean square normalization of the last dimensions, times a weight."""
    return _over(input, weight, None, _shape(normalized_shape), Way(eps, True))


@stands_in(f"{_MODULE}.fused_rms_norm")
def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Return the root mean square normalization of the last dimensions."""
    return _over(input, None, None, _shape(normalized_shape), Way(eps, True))


class _Fused(nn.Module):
    """The module of a normalization."""

    is_rms = False
    mixed = False
    """Whether the result has the dtype of the weight."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        # TorchScript keeps what an instance has.
        self.is_rms = type(self).is_rms
        self.mixed = type(self).mixed
        self.normalized_shape, self.eps = _shape(normalized_shape), eps
        self.elementwise_affine, self.memory_efficient = elementwise_affine, memory_efficient
        self.register_parameter(
            "weight",
            nn.Parameter(torch.ones(self.normalized_shape)) if elementwise_affine else None,
        )
        if not self.is_rms:
            bias = nn.Parameter(torch.zeros(self.normalized_shape)) if elementwise_affine else None
            self.register_parameter("bias", bias)

    def reset_parameters(self) -> None:
        """Set the weight to 1 and the bias to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if not self.is_rms and self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.is_rms else self.bias
        way = Way(self.eps, self.is_rms)
        given = input, self.weight, bias, self.normalized_shape
        return _over(*given, way, is_mixed=self.mixed, of_module=True)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        )


@stands_in(f"{_MODULE}.FusedLayerNorm apex.normalization.FusedLayerNorm")
class FusedLayerNorm(_Fused):
    """The layer normalization of the last dimensions."""


@stands_in(f"{_MODULE}.FusedRMSNorm apex.normalization.FusedRMSNorm")
class FusedRMSNorm(_Fused):
    """The root mean square normalization of the last dimensions."""

    is_rms = True


@stands_in(f"{_MODULE}.MixedFusedLayerNorm apex.normalization.MixedFusedLayerNorm")
class MixedFusedLayerNorm(FusedLayerNorm):
    """The layer normalization, whose result has the dtype of the weight."""

    mixed = True


@stands_in(f"{_MODULE}.MixedFusedRMSNorm apex.normalization.MixedFusedRMSNorm")
class MixedFusedRMSNorm(FusedRMSNorm):
    """The root mean square normalization, whose result has the dtype of the weight."""

    mixed = True


_AMP = "Use torch.autocast('cuda') and torch.amp.GradScaler('cuda'), which took its place."

refuses("apex.amp.initialize apex.amp.scale_loss apex.amp.master_params apex.amp.state_dict", _AMP)
refuses(
    "apex.amp.load_state_dict apex.amp.half_function apex.amp.float_function apex.amp.init", _AMP
)
