"""Values that CUDA defines in another way than the CPU: integers beyond their range, and division of integers by 0.

A conversion to an integer saturates (CUDA's ``__float2int_rz``: NaN gives 0, ``__float2ll_rz``: the lowest integer); on
x86 every such value gives the lowest integer. A GPU does not report a division of integers by 0. Torch documents that
the result may be any value; all bits of the quotient are 1 on NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation import policy
from torchdevice.simulation.allocator.storages import fresh, memory_of
from torchdevice.simulation.kernels.cpu_kernels import dtype_of, index_of

Kernel = Callable[..., Any]

SATURATING = frozenset({torch.int32, torch.int64})

_DIVISIONS = frozenset({"floor_divide", "fmod", "remainder"})


def saturate(source: torch.Tensor, result: torch.Tensor) -> None:
    """Give integers that the CPU made of numbers, in its memory, the values of CUDA's conversion."""
    if not dtype_of(source).is_floating_point or not policy.stands_for_cuda():
        return
    limits = torch.iinfo(dtype_of(result))
    result.masked_fill_(source >= -float(limits.min), limits.max)  # the first number above the range
    if dtype_of(result) is torch.int32:
        result.masked_fill_(source < limits.min, limits.min).masked_fill_(source.isnan(), 0)


def divides(op: Any) -> bool:
    """Return whether an operator divides integers."""
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    return name in _DIVISIONS or (name == "div" and "mode" in op._overloadname)


def dividing(op: Any, kernel: Kernel) -> Kernel:
    """Return a kernel that divides integers by 0 without an error, if the operator divides."""
    if not divides(op):
        return kernel

    def divide(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        zero = _zero(other)
        if zero is None or _is_of_floats(self) or not policy.stands_for_cuda():
            return kernel(self, other, *args, **kwargs)
        result = kernel(self, _with_ones(other, zero), *args, **kwargs)
        limits = torch.iinfo(dtype_of(result))
        memory_of(result).masked_fill_(zero, limits.max if limits.min == 0 else -1)
        return result

    return divide


def _is_of_floats(dividend: Any) -> bool:
    return dtype_of(dividend).is_floating_point if isinstance(dividend, torch.Tensor) else type(dividend) is float


def _zero(divisor: Any) -> torch.Tensor | None:
    """Return where a divisor of integers is 0; None where it is so nowhere."""
    if not isinstance(divisor, torch.Tensor):
        return torch.tensor(True) if type(divisor) in (int, bool) and divisor == 0 else None
    dtype = dtype_of(divisor)
    if dtype.is_floating_point or dtype.is_complex:
        return None
    zero = (divisor if index_of(divisor) < 0 else memory_of(divisor)) == 0
    return zero if zero.any() else None


def _with_ones(divisor: Any, zero: torch.Tensor) -> Any:
    if not isinstance(divisor, torch.Tensor):
        return 1
    if index_of(divisor) < 0:
        return divisor.masked_fill(zero, 1)
    return fresh(memory_of(divisor).masked_fill(zero, 1), index_of(divisor))
