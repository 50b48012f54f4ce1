"""``flash_attn.ops``: normalized sums of two branches, or of a part of the rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchdevice.packages.normalization import (
    Way,
    dropped_out,
    mask_of,
    normalized,
    residual_dtype,
    returned,
    summed,
)
from torchdevice.packages.registry import stands_in, wide_dtype

_MODULE = "flash_attn.ops"


@stands_in("flash_attn.ops.layer_norm.dropout_add_layer_norm_parallel_residual")
def dropout_add_layer_norm_parallel_residual(
    x0: torch.Tensor,
    x1: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight0: torch.Tensor,
    bias0: torch.Tensor | None,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return two layer norms of dropped-out x0 plus x1 plus a residual; by choice the sum too."""
    affine = (weight0, bias0), (weight1, bias1)
    more = dropout_p, prenorm, residual_in_fp32, return_dropout_mask
    return _of_branches(x0, x1, residual, affine, Way(epsilon, False), *more)


@stands_in("flash_attn.ops.rms_norm.dropout_add_rms_norm_parallel_residual")
def dropout_add_rms_norm_parallel_residual(
    x0: torch.Tensor,
    x1: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight0: torch.Tensor,
    bias0: torch.Tensor | None,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return two RMS norms of dropped-out x0 plus x1 plus a residual; by choice the sum too."""
    affine = (weight0, bias0), (weight1, bias1)
    more = dropout_p, prenorm, residual_in_fp32, return_dropout_mask
    return _of_branches(x0, x1, residual, affine, Way(epsilon, True), *more)


def _of_branches(
    x0: torch.Tensor,
    x1: torch.Tensor | None,
    residual: torch.Tensor | None,
    affine: tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...],
    way: Way,
    dropout_p: float,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
) -> tuple[Any, ...]:
    """Return a norm of the sum for each weight, None for none; then by choice sum and masks."""
    dropped, kept = dropped_out(x0, dropout_p, _MODULE)
    masks = [mask_of(x0, kept)]
    total = summed(dropped, residual)
    kept = None
    if x1 is not None:
        dropped, kept = dropped_out(x1, dropout_p, _MODULE)
        total = total + dropped
    masks.append(mask_of(x0, kept))
    total = total.to(residual_dtype(x0, residual, residual_in_fp32))
    norms = [
        None if weight is None else normalized(total, weight, bias, way, x0.dtype)
        for weight, bias in affine
    ]
    found = [*norms, total] if prenorm else norms
    return (*found, *masks) if return_dropout_mask else tuple(found)


@stands_in("flash_attn.ops.layer_norm.dropout_add_layer_norm_subset")
def dropout_add_layer_norm_subset(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: torch.Tensor | None = None,
    x0_subset: torch.Tensor | None = None,
    out_subset: torch.Tensor | None = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the layer norm of a residual plus x0, which has a part of the rows, as the result."""
    parts = _Parts(x0_subset, out_subset, out_numrows)
    scales = layerscale, rowscale_const
    more = dropout_p, prenorm, residual_in_fp32, return_dropout_mask
    return _of_rows(x0, residual, weight, bias, parts, scales, Way(epsilon, False), *more)


@stands_in("flash_attn.ops.rms_norm.dropout_add_rms_norm_subset")
def dropout_add_rms_norm_subset(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: torch.Tensor | None = None,
    x0_subset: torch.Tensor | None = None,
    out_subset: torch.Tensor | None = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the RMS norm of a residual plus x0, which has a part of the rows, as the result."""
    parts = _Parts(x0_subset, out_subset, out_numrows)
    scales = layerscale, rowscale_const
    more = dropout_p, prenorm, residual_in_fp32, return_dropout_mask
    return _of_rows(x0, residual, weight, bias, parts, scales, Way(epsilon, True), *more)


class _Parts(NamedTuple):
    """Which rows x0 has, and which the result.

    Attributes:
        of_x0: For each row of the sum its place in x0, counted from 1; 0 where x0 lacks it.
        of_result: For each row of the sum its place in the result, counted from 1; 0 where the
            result lacks it.
        rows: How many rows the result has.
    """

    of_x0: torch.Tensor | None
    of_result: torch.Tensor | None
    rows: int


def _of_rows(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parts: _Parts,
    scales: tuple[torch.Tensor | None, float],
    way: Way,
    dropout_p: float,
    prenorm: bool,
    residual_in_fp32: bool,
    return_dropout_mask: bool,
) -> Any:
    """Return the norm of the result's rows, then by choice the sum and the mask."""
    size, shape = x0.shape[-1], (-1, *x0.shape[1:])
    layerscale, rowscale = scales
    rows, kept = dropped_out(x0, dropout_p, _MODULE)
    if layerscale is not None:
        rows = rows * layerscale
    rows = rows.reshape(-1, size).to(wide_dtype(x0.dtype)) * rowscale
    if parts.of_x0 is not None:
        rows = torch.cat([rows.new_zeros(1, size), rows])[parts.of_x0.reshape(-1)]
    total = summed(rows, None if residual is None else residual.reshape(-1, size))
    total = total.to(residual_dtype(x0, residual, residual_in_fp32))
    norm = normalized(total, weight, bias, way, x0.dtype)
    if parts.of_result is not None:
        # The rows that the result lacks come to a place before the first one.
        room = norm.new_zeros(parts.rows + 1, size)
        norm = room.index_copy(0, parts.of_result.reshape(-1).long(), norm)[1:]
    more = (prenorm, total.reshape(shape)), (return_dropout_mask, mask_of(x0, kept))
    return returned(norm.reshape(shape), *more)
