"""Kernels that compute shapes and no values, for ``simulate(compute="meta")``.

A tensor of the device has a block of the device's memory, and no memory of this machine. An operator runs on tensors of
torch's meta device in its place, by torch's own meta kernels; where there is none, on fake tensors. So views, strides,
errors about shapes and the memory that autograd keeps are those of a real run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchdevice.devices.stream_order import StreamObserver
from torchdevice.errors import NoValueError
from torchdevice.foundation.stand_ins import StandIns, given_to, tensors, written
from torchdevice.simulation import policy
from torchdevice.simulation.allocator.storages import forget_values, has_no_values, meta_of
from torchdevice.simulation.kernels import device_mismatch, recurrent_cells
from torchdevice.simulation.kernels.cpu_kernels import NUMBERS, Results, index_of, take_shape

_META = torch.device("meta")

_OF_METADATA = frozenset({"aten::set_", "aten::is_set_to", "aten::record_stream", "aten::resize_"})
"""Operators whose kernels for the device look at no values."""

_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})

_LEFT_ALIGNED = "aten::_nested_tensor_from_mask_left_aligned"
"""The question that ``nn.TransformerEncoder`` asks before it makes a nested tensor. Without one it computes the same
shapes."""

_MAKING_NESTED = frozenset({"aten::_nested_tensor_from_mask", "aten::_nested_from_padded"})
"""Operators whose kernel for the meta device would give nested tensors, which operators of the device do not take."""

_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


_KEPT = 16 << 20
"""Tensors of integers and bools of at most so many bytes keep their values, such as positions, masks and labels."""


class WithoutValues(StreamObserver):
    """Runs the kernels of one context."""

    def run(self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operator gives, as tensors without values.

        Small tensors of integers and bools have values where all that they are computed from has.

        Raises:
            NoValueError: The operator needs values.
        """
        name = op._schema.name
        if name in _OF_METADATA:
            return kernel(*args, **kwargs)
        if name == _LEFT_ALIGNED:
            return False
        with torch._C.DisableTorchFunction():
            leaves = list(tensors((args, kwargs)))
            if any(each.layout is not torch.strided or each.is_nested for each in leaves):
                return _with_values(name, kernel, args, kwargs)  # torch's meta device has no such tensors
            known = all(index_of(each) < 0 or not has_no_values(each.untyped_storage()) for each in leaves)
            if gives_values(op, args, kwargs):
                if not known:
                    raise NoValueError(name)
                return kernel(*args, **kwargs)
            if kwargs.get("device") is not None and kwargs["device"].type != policy.DEVICE_TYPE:
                return _elsewhere(op, args, kwargs)
            return _run(op, kernel, args, kwargs, known)


def _with_values(name: str, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a kernel computes of sparse or nested tensors, which refuses those whose parts have no values."""
    try:
        return kernel(*args, **kwargs)
    except NoValueError:
        raise NoValueError(name) from None


def gives_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator returns numbers, or copies to the CPU."""
    name = op._schema.name
    if name == "aten::_to_copy":
        device = kwargs.get("device")
        return device is not None and device.type != policy.DEVICE_TYPE
    if name in _COPIES:
        return bool(args[0].is_cpu)
    return torch.Tag.data_dependent_output in op.tags


def _elsewhere(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator that reads shapes only, such as ``zeros_like``, makes on a device of another type."""
    taken, named = pytree.tree_map_only(torch.Tensor, meta_of, (args, kwargs))
    return op(*taken, **named)


def _run(op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], known: bool) -> Any:
    index = _index(op, args, kwargs)
    named = given_to(op, args, kwargs)
    resizable = [named.get(argument.name) for argument in op._schema.arguments if argument.is_out]
    shapes = _Shapes(op, set(map(id, tensors(resizable))))
    try:
        result = _shapes(op, *shapes.take((args, kwargs)))
    except NoValueError:
        if known:
            return kernel(*args, **kwargs)
        raise
    if any(each.layout is not torch.strided for each in tensors(result)):
        raise NoValueError(op._schema.name)
    if known and all(map(_keeps_values, tensors(result))):
        return kernel(*args, **kwargs)
    for each in written(op, args, kwargs):
        if index_of(each) >= 0 and each.numel():
            forget_values(each.untyped_storage())
    for given, own in map(shapes.pairs.__getitem__, shapes.outs):
        if given.shape != own.shape:
            take_shape(given, own)
    return _results(op).of(result, index, args, kwargs)


class _Shapes(StandIns):
    """Tensors of the meta device in the place of a call's.

    Args:
        op: The operator.
        outs: ``id`` of each tensor that the operator may resize.
    """

    def __init__(self, op: Any, outs: set[int]):
        super().__init__(op)
        self.outs = outs

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return _alone(tensor) if id(tensor) in self.outs else meta_of(tensor)

    def other(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return _META
        return None if isinstance(value, torch.Generator) else value


def _keeps_values(result: torch.Tensor) -> bool:
    return not (result.is_floating_point() or result.is_complex()) and result.nbytes <= _KEPT


@functools.cache
def _tensors(op: Any) -> list[int]:
    """Return the positions of the arguments that are tensors."""
    return [at for at, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"]


_results = functools.cache(Results)


def _index(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the index of the device of a call, whose tensors must be on one device."""
    device = kwargs.get("device")
    if device is not None:
        return device.index or 0
    indices = set(map(index_of, tensors((args, kwargs))))
    if len(indices) > 1:
        device_mismatch.check(op, args, kwargs)
    return max(indices)


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the meta device that the operator may resize."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _shapes(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results of an operator on tensors of the meta device.

    Raises:
        NoValueError: The shapes of the results depend on values.
        NotImplementedError: torch has no kernel that computes the shapes.
    """
    if op._schema.name in _MAKING_NESTED:
        raise NoValueError(op._schema.name)
    formula = recurrent_cells.FORMULAS.get(op._schema.name.partition("::")[2])
    if formula is not None:
        return formula(*args, **kwargs)
    kwargs = {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
    # A number may stand in the place of a tensor, which only the packet of an operator accepts.
    call = op._overloadpacket if any(args[i].__class__ in NUMBERS for i in _tensors(op) if i < len(args)) else op
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:  # of which NotImplementedError is one
        if _NEEDS_VALUES.intersection(op.tags):
            raise NoValueError(op._schema.name) from None
        if not isinstance(error, NotImplementedError):
            raise
        return _shapes_by_fakes(op, args, kwargs)


def _shapes_by_fakes(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results of an operator that has no meta kernel, as fake tensors of the CPU give them."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    def fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def meta(value: torch.Tensor) -> torch.Tensor:
        if value.layout is not torch.strided:
            raise NoValueError(op._schema.name)
        return _alone(value)

    with FakeTensorMode():
        taken, named = pytree.tree_map(fake, (args, kwargs))
        try:
            result = op(*taken, **named)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise NoValueError(op._schema.name) from None
    return pytree.tree_map_only(torch.Tensor, meta, result)
