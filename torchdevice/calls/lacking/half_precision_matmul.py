"""Products of float16 and bfloat16 tensors on a CPU that has no instructions for them.

Torch computes such a product up to a hundred times slower than the product of float32 tensors. So
the operands are converted to float32, and the result is rounded once, as CUDA's matrix units do.

:data:`TABLE` is a part of the table of rewriters only in a context with ``dtypes.in_float32``.
Elsewhere its functions have no rewriter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchdevice.calls import rewriters
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.runtime import HALF
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.stand_ins import mapped, tensors

_LEAST_ELEMENTS = 1024
"""A product of operands with fewer elements takes no longer than their conversion."""

_LEAST_ROWS = 4
"""The number of rows from which the product with a transposed weight takes longer than the
conversion of the weight.
"""

_REQUESTED = {dtype: f"a product of {dtype} tensors" for dtype in HALF}


def begins_in_float32(args: tuple[Any, ...]) -> bool:
    """Return whether the first argument of a product is float32, which needs no conversion."""
    # By attribute: the argument may be a number or a list. Dynamo of torch 2.10 does not trace
    # bool() of a tuple.
    return len(args) > 0 and getattr(args[0], "dtype", None) is torch.float32


def _product(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a product of half tensors in float32."""
    if begins_in_float32(args) or not _is_slow(context, operands := [*tensors((args, kwargs))]):
        return func(*args, **kwargs)
    return _in_float32(context, func, args, kwargs, operands[0].dtype)


def _in_place(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a product that is added to the first argument."""
    if begins_in_float32(args) or not _is_slow(context, [*tensors((args, kwargs))]):
        return func(*args, **kwargs)
    # As `out`, so that the sum is rounded once, into the argument.
    return _in_float32(context, func, args, {**kwargs, "out": args[0]}, args[0].dtype)


def _by_weight(across: int) -> rewriters.Rewriter:
    """Return the rewriter of products by a possible weight of a layer.

    The product of few rows is left to torch, if consecutive elements along the dimension ``across``
    of the weight are neighbours in memory: torch then reads the weight once a row. ``autograd``
    computes further products, which are slow in any case.
    """

    def rewriter(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if begins_in_float32(args):
            return func(*args, **kwargs)
        if (
            len(args) >= 2
            and isinstance(args[0], torch.Tensor)
            and isinstance(args[1], torch.Tensor)
        ):
            rows, weight = args[:2]
            # Fewer than four rows: torch reads the weight once a row, faster than a conversion.
            few = rows.dim() > 0 and rows.numel() < _LEAST_ROWS * rows.shape[-1]
            # `stride(across) == 1` means a weight as a layer stores it, row by row.
            if (
                few
                and weight.dim() == 2
                and weight.stride(across) == 1
                and not _is_differentiated([rows, weight])
            ):
                return func(*args, **kwargs)
        return _product(context, func, args, kwargs)

    return rewriter


def _attention(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute attention in float32 for training, which torch lacks a half kernel for."""
    if begins_in_float32(args):
        return rewriters.attention(context, func, args, kwargs)
    operands = [*tensors((args, kwargs))]
    # The fifth argument of `scaled_dot_product_attention`.
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    if not (dropout or _is_differentiated(operands)) or not _is_slow(context, operands):
        return rewriters.attention(context, func, args, kwargs)
    return _in_float32(context, func, args, kwargs, operands[0].dtype)


def _is_slow(context: Context, operands: list[torch.Tensor]) -> bool:
    """Return whether a product takes torch longer than the conversion of the operands to float32.

    Operands of different dtypes are left to torch, which raises an error; so are tensors of other
    classes and layouts. Inside autocast torch converts operands by itself.
    """
    dtype = operands[0].dtype if operands else None
    # In autocast the operands are converted by torch, which would undo this conversion.
    if dtype not in context.dtypes.in_float32 or torch.is_autocast_enabled("cpu"):
        return False
    largest = 0
    for operand in operands:
        # Torch raises for different dtypes, and must.
        if operand.is_floating_point() and operand.dtype is not dtype:
            return False
        if (
            type(operand) not in (torch.Tensor, torch.nn.Parameter)
            or operand.layout is not torch.strided
        ):
            return False
        if operand.is_nested:
            return False
        largest = max(largest, operand.numel())
    return largest >= _LEAST_ELEMENTS


def _is_differentiated(operands: list[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)


def _in_float32(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Any:
    context.report(_REQUESTED[dtype], "computed in float32 and rounded once", Fidelity.EXACT)
    out = kwargs.pop("out", None)
    wide, named = _converted((args, kwargs), dtype, torch.float32)
    result = func(*wide, **named)
    if out is None:
        return _converted(result, torch.float32, dtype)
    if out.shape != result.shape:
        out.resize_(result.shape)  # as torch does
    return out.copy_(result)


def _converted(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    """Return arguments or results with the tensors of one dtype converted to another."""

    def converted(each: Any) -> Any:
        return each.to(wanted) if isinstance(each, torch.Tensor) and each.dtype is given else each

    return mapped(value, converted)


_PRODUCTS = (
    "__rmatmul__",
    "bmm",
    "addmm",
    "addbmm",
    "baddbmm",
    "chain_matmul",
    "multi_dot",
    "inner",
    "tensordot",
    "einsum",
    "bilinear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_tbc",
    "convolution",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
)

_NAMES: Mapping[rewriters.Rewriter, Sequence[str]] = {
    _by_weight(across=1): ("linear",),
    _by_weight(across=0): ("matmul", "__matmul__", "mm"),
    _in_place: ("addmm_", "addbmm_", "baddbmm_"),
    _attention: ("scaled_dot_product_attention",),
    _product: _PRODUCTS,
}

_NAMESPACES = (torch, torch.Tensor, torch.nn.functional, torch._C._nn, torch._VF, torch.linalg)

TABLE: Mapping[Any, rewriters.Rewriter] = {
    getattr(namespace, name): rewriter
    for rewriter, names in _NAMES.items()
    for name in names
    for namespace in _NAMESPACES
    if hasattr(namespace, name)
}
"""Torch function -> its rewriter."""
