"""Reductions as NCCL has them, by the operations and dtypes that gloo has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_Kind = dist.ReduceOp.RedOpType

_NOT_OF_NCCL = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)

# On bytes of 0 and 1 the largest is the logical or, and the smallest the logical and.
_OF_BOOL = {_Kind.SUM: _Kind.MAX, _Kind.PRODUCT: _Kind.MIN}
"""The operations for bools: the logical or in place of sums, the logical and in place of products."""


def named(value: Any) -> Any:
    """Return the name of a reduction's operation, and any other value unchanged."""
    return value.__getstate__()[0].name if isinstance(value, dist.ReduceOp) else value


def reduce_flat(flat: torch.Tensor, op: Any, size: int, collective: Callable[..., Any], options: Any) -> None:
    """Reduce one-dimensional numbers in place.

    Args:
        flat: The numbers of this rank.
        op: The operation that the program asks for.
        size: The number of ranks.
        collective: gloo's, which does it for the dtypes and operations that gloo has.
        options: Its options, without the operation.
    """
    # A ReduceOp shows its kind, and the factor of `PREMUL_SUM`, by its pickled state only.
    kind, factor = op.__getstate__()
    if kind in _NOT_OF_NCCL:
        raise ValueError(f"Cannot use ReduceOp.{kind.name} with NCCL")
    if flat.is_complex():
        if kind in (_Kind.MAX, _Kind.MIN, _Kind.PRODUCT):
            raise RuntimeError(f"all_reduce does not support ReduceOp.{kind.name} on complex tensors")
        # Sums and averages of complex numbers are those of their parts.
        flat = torch.view_as_real(flat).view(-1)
    if flat.dtype is torch.bool:
        if kind == _Kind.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        kind = _OF_BOOL.get(kind, kind)
        # Gloo has no bool, and a bool is one byte.
        flat = flat.view(torch.uint8)
    if kind == _Kind.PREMUL_SUM:
        # In the rank's own numbers, before they are sent.
        flat.mul_(factor.cpu() if isinstance(factor, torch.Tensor) else factor)
    options.reduceOp = dist.ReduceOp.SUM if kind in (_Kind.PREMUL_SUM, _Kind.AVG) else dist.ReduceOp(kind)
    collective([flat], options).wait()
    if kind == _Kind.AVG:
        # NCCL divides integers and drops the remainder, towards 0.
        flat.div_(size, rounding_mode=None if flat.is_floating_point() else "trunc")
