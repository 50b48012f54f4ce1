"""``flash_attn.ops``: normalized sums of two branches, or of a part of the rows."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.packages.normalization import Way, dropped_out, mask_of, normalized, residual_dtype
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
    branches = _Branches(x0, x1, residual, dropout_p, residual_in_fp32)
    affine = (weight0, bias0), (weight1, bias1)
    return branches.normalized(affine, Way(epsilon, False), prenorm, return_dropout_mask)


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
    branches = _Branches(x0, x1, residual, dropout_p, residual_in_fp32)
    affine = (weight0, bias0), (weight1, bias1)
    return branches.normalized(affine, Way(epsilon, True), prenorm, return_dropout_mask)


class _Branches:
    """The sum of a residual and of two branches, of which the second may be None."""

    def __init__(
        self,
        x0: torch.Tensor,
        x1: torch.Tensor | None,
        residual: torch.Tensor | None,
        dropout_p: float,
        residual_in_fp32: bool,
    ) -> None:
        self._x0 = x0
        wide = wide_dtype(x0.dtype)
        self._kept: list[torch.Tensor | None] = []
        total = None if residual is None else residual.to(wide)
        for x in (x0, x1):
            dropped, kept = (None, None) if x is None else dropped_out(x, dropout_p, _MODULE)
            self._kept.append(kept)
            if dropped is not None:
                total = dropped.to(wide) if total is None else total + dropped
        assert total is not None  # x0 is not None
        self._total = total.to(residual_dtype(x0, residual, residual_in_fp32))

    def normalized(self, affine: Any, way: Way, prenorm: bool, return_dropout_mask: bool) -> Any:
        """Return a norm for each weight, or None; then by choice the sum and the masks."""
        found: list[Any] = []
        for weight, bias in affine:
            norm = None
            if weight is not None:
                norm = normalized(self._total, weight, bias, way, self._x0.dtype)
            found.append(norm)
        if prenorm:
            found.append(self._total)
        if return_dropout_mask:
            found += [mask_of(self._x0, kept) for kept in self._kept]
        return tuple(found)


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
    rows = _Rows(x0, x0_subset, out_subset, out_numrows)
    rows.add(residual, layerscale, rowscale_const, dropout_p, residual_in_fp32)
    return rows.normalized(weight, bias, Way(epsilon, False), prenorm, return_dropout_mask)


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
    rows = _Rows(x0, x0_subset, out_subset, out_numrows)
    rows.add(residual, layerscale, rowscale_const, dropout_p, residual_in_fp32)
    return rows.normalized(weight, bias, Way(epsilon, True), prenorm, return_dropout_mask)


class _Rows:
    """Rows of which x0 has some, and the result others.

    Args:
        x0: (..., size), the rows that there are.
        x0_subset: For each row of the sum its place in x0, counted from 1; 0 where x0 lacks it.
        out_subset: For each row of the sum its place in the result, counted from 1; 0 where the
            result lacks it.
        out_numrows: How many rows the result has.
    """

    def __init__(
        self,
        x0: torch.Tensor,
        x0_subset: torch.Tensor | None,
        out_subset: torch.Tensor | None,
        out_numrows: int,
    ) -> None:
        self._x0 = self._total = x0
        self._subset = x0_subset
        self._out = out_subset
        self._count = out_numrows
        self._kept: torch.Tensor | None = None

    def add(
        self,
        residual: torch.Tensor | None,
        layerscale: torch.Tensor | None,
        rowscale: float,
        dropout_p: float,
        residual_in_fp32: bool,
    ) -> None:
        """Add the scaled rows to the residual."""
        x, size = self._x0, self._x0.shape[-1]
        wide = wide_dtype(x.dtype)
        rows, self._kept = dropped_out(x, dropout_p, _MODULE)
        if layerscale is not None:
            rows = rows * layerscale
        rows = rows.reshape(-1, size).to(wide) * rowscale
        if self._subset is not None:
            rows = torch.cat([rows.new_zeros(1, size), rows])[self._subset.reshape(-1)]
        if residual is not None:
            rows = rows + residual.reshape(-1, size).to(wide)
        self._total = rows.to(residual_dtype(x, residual, residual_in_fp32))

    def normalized(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        way: Way,
        prenorm: bool,
        return_dropout_mask: bool,
    ) -> Any:
        """Return the norm of the result's rows, then by choice the sum and the mask."""
        x = self._x0
        shape = -1, *x.shape[1:]
        norm = normalized(self._total, weight, bias, way, x.dtype)
        if self._out is not None:
            # The rows that the result lacks come to a place before the first one.
            room = norm.new_zeros(self._count + 1, norm.shape[-1])
            norm = room.index_copy(0, self._out.reshape(-1).long(), norm)[1:]
        found = [norm.reshape(shape)]
        if prenorm:
            found.append(self._total.reshape(shape))
        if return_dropout_mask:
            found.append(mask_of(x, self._kept))
        return found[0] if len(found) == 1 else tuple(found)
