"""Integer values where CUDA's differ from the CPU's: beyond the range, and divided by 0.

A conversion saturates at the limits of a wide integer, whose low bits are the result; on x86 such a
number gives the lowest integer. A GPU does not report a division of integers by 0, and torch
documents that the result may be any value. The values here are those of an NVIDIA H200 with torch
2.11 (``benchmarks/conformance.json``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation import policy
from torchdevice.simulation.allocator.storages import fresh, memory_of
from torchdevice.simulation.kernels.cpu_kernels import dtype_of, host_alias, index_of

Kernel = Callable[..., Any]

WIDE = {
    **dict.fromkeys((torch.int8, torch.int16, torch.int32), torch.int32),
    **dict.fromkeys((torch.uint8, torch.int64), torch.int64),
    **dict.fromkeys((torch.uint16, torch.uint32), torch.uint32),
    torch.uint64: torch.uint64,
}
"""Integer -> the wide integer that a floating-point number becomes first."""

_UNDIVIDED = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""The integers for which neither device has a kernel that divides."""

_DIVISIONS = frozenset({"floor_divide", "fmod", "remainder"})


def saturate(source: torch.Tensor, result: torch.Tensor) -> None:
    """Correct the CPU's out-of-range integers, of a dtype in ``WIDE``, in place to CUDA's."""
    kind, dtype = dtype_of(source), dtype_of(result)
    if not kind.is_floating_point or not source.numel() or not policy.stands_for_cuda():
        return
    numbers, limits = source.double(), torch.iinfo(dtype)
    least, most = (each.item() for each in numbers.aminmax())
    if limits.min <= least and most <= limits.max:  # neither holds for NaN
        return
    limits = torch.iinfo(WIDE[dtype])
    # As an int64, whose bits are negative for a number from 2**63 on.
    wide = torch.where(numbers < 2.0**63, numbers, numbers - 2.0**64).long()
    highest = limits.max if limits.max < 2**63 else -1
    wide.masked_fill_(numbers >= float(limits.max + 1), highest).masked_fill_(
        numbers < limits.min, limits.min
    )
    nan = 0
    if limits.bits == 64:
        nan = -(2**63)
    elif kind is torch.float64:
        nan = 2**31
    result.copy_(wide.masked_fill_(numbers.isnan(), nan))


def divides(schema: Any) -> bool:
    """Return whether an operator with this schema divides integers."""
    name = schema.name.removeprefix("aten::").rstrip("_")
    return name in _DIVISIONS or (name == "div" and "mode" in schema.overload_name)


def dividing(schema: Any, kernel: Kernel) -> Kernel:
    """Return a kernel that divides integers by 0 without an error, if the operator divides."""
    if not divides(schema):
        return kernel

    def divide(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        zero = _zero(other)
        if zero is None or _has_no_integers(self) or not policy.stands_for_cuda():
            return kernel(self, other, *args, **kwargs)
        negative = (host_alias(self) if isinstance(self, torch.Tensor) else torch.tensor(self)) < 0
        result = kernel(self, _with_ones(other, zero), *args, **kwargs)
        dtype = dtype_of(result)
        if dtype is torch.int64:
            quotient = 2**32 - 1
        else:
            quotient = -1 if dtype.is_signed else torch.iinfo(dtype).max
        floors = "floor_divide" in schema.name or kwargs.get("rounding_mode") == "floor"
        memory_of(result).masked_fill_(zero, quotient).masked_fill_(
            zero & negative, -2 if floors else -1
        )
        return result

    return divide


def _has_no_integers(dividend: Any) -> bool:
    if isinstance(dividend, torch.Tensor):
        dtype = dtype_of(dividend)
        return dtype.is_floating_point or dtype in _UNDIVIDED
    return type(dividend) is float


def _zero(divisor: Any) -> torch.Tensor | None:
    """Return where a divisor of integers is 0; None where it is so nowhere."""
    if not isinstance(divisor, torch.Tensor):
        return torch.tensor(True) if type(divisor) in (int, bool) and divisor == 0 else None
    dtype = dtype_of(divisor)
    if dtype.is_floating_point or dtype.is_complex or dtype in _UNDIVIDED:
        return None
    zero = (divisor if index_of(divisor) < 0 else memory_of(divisor)) == 0
    return zero if zero.any() else None


def _with_ones(divisor: Any, zero: torch.Tensor) -> Any:
    if not isinstance(divisor, torch.Tensor):
        return 1
    if index_of(divisor) < 0:
        return divisor.masked_fill(zero, 1)
    return fresh(memory_of(divisor).masked_fill(zero, 1), index_of(divisor))
