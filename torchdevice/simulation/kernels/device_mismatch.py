"""CUDA's errors for tensors on several devices, and the calls that CUDA accepts nevertheless.

Torch generates a device check for most CUDA kernels. The kernels that use its tensor iterator check
for themselves and accept CPU tensors without dimensions as scalars: native_functions.yaml marks
them ``device_check: NoCheck``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdevice.kernel.stand_ins import given_to, tensors
from torchdevice.simulation import policy
from torchdevice.simulation.profiles import is_structured, unchecked_operators

_ON_SEVERAL = frozenset(
    f"aten::{name}"
    for name in ("copy_", "copy_sparse_to_sparse_", "resize_as_sparse_", "_nested_from_padded")
)
"""Operators that take tensors on several devices: copies, and one that takes sizes, which are
always on the CPU.
"""


def accepts_cpu_scalars(op: Any) -> bool:
    """Return whether CUDA accepts a CPU tensor without dimensions among an operator's arguments."""
    return _name(op) in unchecked_operators()


def check(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise CUDA's RuntimeError for tensors on several devices, unless CUDA accepts the call.

    CUDA compares each tensor with the first; the error names the first tensor that is on another
    device.
    """
    if op._schema.name in _ON_SEVERAL:
        return
    scalars = accepts_cpu_scalars(op)
    placed = [
        (name, tensor.get_device())
        for name, value in given_to(op, args, kwargs).items()
        for tensor in tensors(value)
        if not (scalars and tensor.is_cpu and not tensor.dim())
    ]
    first = placed[0][1]
    for name, index in placed:
        if index != first:
            _refuse(op, name, index, first)


_ON_TWO_DEVICES = (
    "Expected all tensors to be on the same device, but found at least two devices, {one} and "
    "{other}!"
)


_ON_ANOTHER_DEVICE = (
    "Expected all tensors to be on the same device, but got {name} is on {its}, different from "
    "other tensors on {on} (when checking argument in method wrapper_CUDA_{wrapper})"
)


def _refuse(op: Any, name: str, index: int, first: int) -> None:
    """Raise the error of the operator's own check, the tensor iterator's, or the generated one."""
    its, on = _spelled(index), _spelled(first)
    base = op._schema.name.removeprefix("aten::").strip("_").removesuffix("_impl")
    if base in ("index", "index_put") and index < 0 and name == "indices":
        return
    if base in ("index", "index_put") and first < 0:
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    if base == "masked_fill" and name == "mask":
        raise RuntimeError(
            f"expected self and mask to be on the same device, but got mask on {its} and self on "
            f"{on}"
        )
    if accepts_cpu_scalars(op):
        # The tensor iterator names the accelerator first.
        one, other = (its, on) if first < 0 else (on, its)
        raise RuntimeError(_ON_TWO_DEVICES.format(one=one, other=other))
    if policy.stands_for_mps():
        raise RuntimeError("Passed CPU tensor to MPS op")
    # The name of CUDA's wrapper: `name_overload` for a structured operator, else `overload_name`.
    of_op, overload = op._schema.name.removeprefix("aten::"), op._schema.overload_name
    if is_structured(_name(op)):
        wrapper = f"{of_op}_{overload}" if overload else of_op
    else:
        wrapper = f"{overload}_{of_op}"
    raise RuntimeError(_ON_ANOTHER_DEVICE.format(name=name, its=its, on=on, wrapper=wrapper))


def _spelled(index: int) -> str:
    return "cpu" if index < 0 else policy.spelled(index)


def _name(op: Any) -> str:
    return op.name().removeprefix("aten::")  # type: ignore[no-any-return]
