"""Stands in for values in a plan that computes none: ``compute="meta", values="assume"``.

A value that was not computed reads as 0, and a condition on it as False. An operator whose result's
size depends on such values has the result that it has where all of them are 1: ``nonzero`` and a
mask select everything. With ``values="assume-fewest"`` it has the result for 0, and they select
nothing.

A ``GradScaler`` reads whether its operator found an infinity among the gradients, and skips the
step of the optimizer if so. Its optimizer has no state before the first step that it does not skip.

``torch.distributions`` reads whether its arguments are valid, and they are.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torchdevice.errors import NoValueError
from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal import callers
from torchdevice.kernel.stand_ins import tensors
from torchdevice.simulation.allocator.storages import has_no_values
from torchdevice.simulation.kernels.cpu_kernels import CpuAliases, index_of
from torchdevice.simulation.observe.meta_kernels import (
    KEPT,
    WithoutValues,
    gives_values,
    like_on_meta,
)

ASSUMED = "assumed: "
"""The beginning of a report's row on assumed values."""

MOST, FEWEST = "all are 1", "all are 0, and nothing is selected"
"""The assumption about values on which a size depends."""

STEPS, SKIPS = "no infinity, so the optimizer steps", "an infinity, so the step is skipped"
"""The assumption about the gradients of a ``GradScaler``."""

VALID = "the arguments are valid"
"""The assumption about the arguments of ``torch.distributions``."""

FIRST = "the first part has everything"
"""The assumption about the parts of a tensor whose sizes the program read."""

_PLACES = "aten::nonzero"

_DISTRIBUTIONS = "torch.distributions.distribution"
"""The module that checks them. It reads nothing else."""

_SCALER = "aten::_amp_foreach_non_finite_check_and_unscale_"

_NAMES = {
    "aten::_local_scalar_dense": "item()",
    "aten::_to_copy": "copy to the CPU",
    "aten::copy_": "copy to the CPU",
}
"""Operators that a program does not call by their name."""


class AssumedValues(WithoutValues):
    """Runs the kernels of one context.

    Args:
        context: The context, which notes each assumption with its line.
    """

    def __init__(self, context: Context):
        super().__init__()
        self._context = context
        self._selected = 0 if context.options.values == "assume-fewest" else 1
        self._said_of_sizes = MOST if self._selected else FEWEST
        registered_kernels.put_in_front(
            "aten::split_with_sizes", "PrivateUse1", _split, "the sizes of a plan"
        )
        self._infinities = WeakIdKeyDictionary()
        """Tensors in which a ``GradScaler`` is told whether there was an infinity."""

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator. Values that it needs are assumed where there are none.

        Raises:
            NoValueError: They are those of sparse or nested tensors, or the program gives the
                tensor for the result.
        """
        if op._schema.name == _SCALER:
            self._infinities[args[1]] = True
        elif op._schema.name == "aten::_local_scalar_dense":
            known = self._known(args[0])
            if known is not None:
                return known
        decided = _decided(op, args) if op._schema.name in _NEUTRAL else None
        if decided is not None:
            return decided
        try:
            return super().run(op, kernel, args, kwargs)
        except NoValueError:
            reads = gives_values(op, args, kwargs)
            if not _are_plain(args, kwargs) or not (reads or _has_size_by_values(op)):
                raise
        return self._assume(op, reads, args, kwargs)

    def _assume(self, op: Any, reads: bool, args: Any, kwargs: Any) -> Any:
        """Run an operator on assumed values, and report that they were assumed."""
        with torch._C.DisableTorchFunction():
            assumed = 0 if reads else self._selected
            # The places of selected elements are known, and a program may name a layer by one.
            known = reads or (op._schema.name == _PLACES and _is_small(args[0]))
            result = _Assumed(op, assumed, gives_values=known).call(args, kwargs)
            said = _read_as(result) if reads else self._said_of_sizes
            name = _NAMES.get(op._schema.name, op._schema.name.removeprefix("aten::"))
            self._context.report(name, ASSUMED + said, Fidelity.APPROXIMATE)
            return result

    def _known(self, tensor: torch.Tensor) -> float | bool | None:
        """Return the value that a scaler or a distribution reads; None for other tensors."""
        if not has_no_values(tensor.untyped_storage()):
            return None
        if tensor in self._infinities:
            said, value = (STEPS, 0.0) if self._selected else (SKIPS, 1.0)
        elif tensor.dtype is torch.bool and _DISTRIBUTIONS in _torchs_modules():
            said, value = VALID, True
        else:
            return None
        self._context.report("item()", ASSUMED + said, Fidelity.APPROXIMATE)
        return value


def _split(
    keys: Any, own: registered_kernels.Own, tensor: torch.Tensor, sizes: Any, dim: int = 0
) -> Any:
    """``split_with_sizes`` in front of torch's own, which has no kernel for a device.

    Sizes that the program read from values are 0. Of these the first is assumed to be all: whatever
    the others are, the sum is the same.
    """
    context = thread_state.state.context
    if context is None or not (context.options.values or "").startswith("assume"):
        return own(tensor, sizes, dim)
    if sizes and not any(sizes) and tensor.shape[dim]:
        context.report("split()", ASSUMED + FIRST, Fidelity.APPROXIMATE)
        sizes = [tensor.shape[dim], *sizes[1:]]
    return own(tensor, sizes, dim)


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether the places of a tensor's elements keep their values."""
    return tensor.numel() * max(tensor.dim(), 1) * torch.int64.itemsize <= KEPT


def _torchs_modules() -> Iterator[str]:
    """Yield the modules of torch and of this package through which the program's line came here."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and callers.kind_of(frame) == callers.OURS:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def _are_plain(args: Any, kwargs: Any) -> bool:
    return all(
        each.layout is torch.strided and not each.is_nested for each in tensors((args, kwargs))
    )


def _has_size_by_values(op: Any) -> bool:
    """Return whether a result's size depends on values: it may for operators outside ATen."""
    if any(argument.is_out for argument in op._schema.arguments):
        return False
    return torch.Tag.dynamic_output_shape in op.tags or op.namespace != "aten"


def _read_as(result: Any) -> str:
    return f"{result}" if isinstance(result, (int, float)) else "all are 0"


_NEUTRAL = {"aten::bitwise_and": 1, "aten::bitwise_or": 0}
"""An operator -> the value of a condition that leaves the other operand as it is."""


def _decided(op: Any, args: Any) -> torch.Tensor | None:
    """Return the one of two conditions that has values; None if both have, or neither.

    So a loop that ends at a length or at a value, as that of ``generate`` does, ends at the length.
    """
    given = list(tensors(args))
    unknown = [index_of(each) >= 0 and has_no_values(each.untyped_storage()) for each in given]
    if (
        sorted(unknown) != [False, True]
        or any(each.dtype is not torch.bool for each in given)
        or len(args) > 2
    ):
        return None
    with torch._C.DisableTorchFunction():
        return _Assumed(op, _NEUTRAL[op._schema.name]).call(args, {})


class _Assumed(CpuAliases):
    """CPU tensors for those of a call: full of one value where the device's have none.

    Args:
        op: The operator.
        value: The value.
        gives_values: Whether the results have the values that are computed.
    """

    def __init__(self, op: Any, value: int, gives_values: bool = True):
        super().__init__(op)
        self._value, self._gives_values = value, gives_values

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if not has_no_values(tensor.untyped_storage()):
            return super().alias(tensor)
        # One number for all elements, because the tensor may be larger than this machine.
        return torch.full((), self._value, dtype=tensor.dtype, device="cpu").expand(tensor.shape)

    def back(self, result: torch.Tensor) -> torch.Tensor:
        return super().back(result if self._gives_values else like_on_meta(result))
