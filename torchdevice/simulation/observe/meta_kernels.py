"""Kernels that compute shapes and no values, for ``simulate(compute="meta")``.

A tensor of the device has a block of the device's memory, and no memory of this machine. Torch's
own meta kernels run an operator on tensors of the meta device instead; where there is none, on fake
tensors. So views, strides, errors about shapes and the memory that autograd keeps are those of a
real run. The shapes of a call serve the calls like it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchdevice.errors import NoValueError
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.stand_ins import StandIns, extent, given_to, mapped, tensors, written
from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.simulation import policy
from torchdevice.simulation.allocator.storages import (
    forget_values,
    has_no_values,
    meta_of,
    owner_at,
)
from torchdevice.simulation.kernels import device_mismatch, recurrent_networks
from torchdevice.simulation.kernels.cpu_kernels import NUMBERS, Results, index_of, take_shape

_META = torch.device("meta")

_OF_METADATA = frozenset({"aten::set_", "aten::is_set_to", "aten::record_stream", "aten::resize_"})
"""Operators whose kernels for the device look at no values."""

_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})

_LEFT_ALIGNED = "aten::_nested_tensor_from_mask_left_aligned"
"""The question that ``nn.TransformerEncoder`` asks before it makes a nested tensor. Without one it
computes the same shapes.
"""

_MAKING_NESTED = frozenset({"aten::_nested_tensor_from_mask", "aten::_nested_from_padded"})
"""Operators whose kernel for the meta device would give nested tensors, which operators of the
device do not take.
"""

_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_SIZE_BY_VALUES = "may return an output Tensor with data-dependent shape"
"""A part of the error of torch's fake tensors."""


KEPT = 16 << 20
"""Tensors of integers and bools of at most so many bytes keep their values, such as positions,
masks and labels.
"""


_MOST = 1 << 13
"""How many plans a context keeps."""


class WithoutValues(Observer):
    """Runs the kernels of one context."""

    def __init__(self) -> None:
        self._plans: dict[Any, _Plan] = {}

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator, and return tensors without values.

        Small tensors of integers and bools have values where all that they are computed from has.

        Raises:
            NoValueError: The operator needs values.
        """
        with torch._C.DisableTorchFunction():
            key = _key(op, args, kwargs)
            plan = self._plans.get(key)
            if plan is not None:
                return plan(kernel, args, kwargs)
            name = op._schema.name
            if name == _LEFT_ALIGNED:
                return False
            leaves = list(tensors((args, kwargs)))
            # The meta device has no sparse and nested tensors: kernels refuse valueless parts.
            has_parts = any(each.layout is not torch.strided or each.is_nested for each in leaves)
            if name in _OF_METADATA or has_parts:
                return kernel(*args, **kwargs)
            known = all(map(_has_values, leaves))
            if gives_values(op, args, kwargs):
                if not known:
                    raise NoValueError(name)
                return kernel(*args, **kwargs)
            device = kwargs.get("device")
            if device is not None and device.type != policy.DEVICE_TYPE:
                # An operator that reads only shapes, as `zeros_like`, on a device of another type.
                taken, named = pytree.tree_map_only(torch.Tensor, meta_of, (args, kwargs))
                return op(*taken, **named)
            result, plan = _run(op, kernel, args, kwargs, known)
            if plan is not None and key is not None:
                self._keep(key, plan)
            return result

    def _keep(self, key: Any, plan: _Plan) -> None:
        if len(self._plans) >= _MOST:
            self._plans.clear()
        self._plans[key] = plan


def _has_values(tensor: torch.Tensor) -> bool:
    return index_of(tensor) < 0 or not has_no_values(tensor.untyped_storage())


def gives_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator returns numbers, or copies to the CPU."""
    name = op._schema.name
    if name == "aten::_to_copy":
        device = kwargs.get("device")
        return device is not None and device.type != policy.DEVICE_TYPE
    if name in _COPIES:
        return bool(args[0].is_cpu)
    return torch.Tag.data_dependent_output in op.tags


def _run(
    op: Any, kernel: Callable[..., Any], args: Any, kwargs: Any, known: bool
) -> tuple[Any, _Plan | None]:
    """Return a call's results, and a way to make those of like calls, if nothing else matters."""
    index = _index(op, args, kwargs)
    named = given_to(op, args, kwargs)
    resizable = [named.get(argument.name) for argument in op._schema.arguments if argument.is_out]
    shapes = _Shapes(op, set(map(id, tensors(resizable))))
    try:
        result = _shapes(op, *shapes.take((args, kwargs)))
    except NoValueError:
        if known:
            return kernel(*args, **kwargs), None
        raise
    if any(each.layout is not torch.strided for each in tensors(result)):
        raise NoValueError(op._schema.name)
    without_values = (
        each.is_floating_point() or each.is_complex() or each.nbytes > KEPT
        for each in tensors(result)
    )
    if known and not any(without_values):
        return kernel(*args, **kwargs), lambda kernel, args, kwargs: kernel(*args, **kwargs)
    if shapes.outs:
        plan = None
    else:
        plan = _plan(op, index, result, [own for _, own in shapes.pairs.values()])
    _forget_written(op, args, kwargs)
    for given, own in map(shapes.pairs.__getitem__, shapes.outs):
        if given.shape != own.shape:
            take_shape(given, own)
    return _results(op).of(result, index, args, kwargs), plan


def _forget_written(op: Any, args: Any, kwargs: Any) -> None:
    for each in written(op, args, kwargs):
        if index_of(each) >= 0 and each.numel():
            forget_values(each.untyped_storage())


# ---- plans ---------------------------------------------------------------------------------------


class _Unplanned(Exception):
    """Calls like this one need not have the same results."""


_Plan = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Returns the results of a call, given the arguments of ``WithoutValues.run``."""


def _planned(
    op: Any, index: int, makers: list[Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    _forget_written(op, args, kwargs)
    made = [mapped(each, lambda make: make if make is None else make()) for each in makers]
    return _results(op).of(made[0] if len(made) == 1 else made, index, args, kwargs)


def _plan(op: Any, index: int, result: Any, given: list[torch.Tensor]) -> _Plan | None:
    """Return the plan of a call on meta tensors ``given``; None unless results are new tensors."""
    storages = {each.untyped_storage()._cdata for each in given}

    def maker(new: Any) -> Any:
        if new is None:
            return None
        if (
            not isinstance(new, torch.Tensor)
            or new.storage_offset()
            or new.is_conj()
            or new.is_neg()
        ):
            raise _Unplanned
        storage = new.untyped_storage()
        if storage._cdata in storages or storage.nbytes() != extent(new) * new.itemsize:
            raise _Unplanned
        storages.add(storage._cdata)
        return functools.partial(
            torch.empty_strided, new.shape, new.stride(), dtype=new.dtype, device=_META
        )

    positions = _results(op).positions
    results = [result] if len(positions) == 1 else result
    try:
        # `as_strided_scatter` and the like depend on the size of a storage.
        if "as_strided" in op._schema.name:
            raise _Unplanned
        makers = [
            mapped(each, maker) if at < 0 else None
            for at, each in zip(positions, results or (), strict=True)
        ]
    except _Unplanned:
        return None
    return functools.partial(_planned, op, index, makers)


def _key(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the cache key of a call's output shapes; None if the call cannot be cached."""
    seen: dict[int, int] = {}
    # Numbers of such an operator change only values, and an optimizer's change at each step.
    by_class = op._schema.name.startswith("aten::_foreach_")
    try:
        given = (
            _mark(args, seen, by_class),
            tuple(kwargs),
            _mark(tuple(kwargs.values()), seen, by_class),
        )
    except _Unplanned:
        return None
    default = torch.get_default_dtype()
    return (
        id(op),
        given,
        default,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_inference_mode_enabled(),
    )


_PLAIN = {
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.device,
}


def _mark(values: Any, seen: dict[int, int], by_class: bool) -> tuple[Any, ...]:
    """Return arguments' part in the key. ``seen`` maps storages to addresses at first sight."""
    marks: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            marks.append(_mark_of_tensor(value, seen))
        elif kind is list or kind is tuple:
            marks.append(_mark(value, seen, by_class))
        elif (by_class and kind is float) or isinstance(value, torch.Generator):
            marks.append(kind)
        elif kind in _PLAIN:
            marks.append((kind, value))
        else:
            raise _Unplanned
    return tuple(marks)


def _mark_of_tensor(tensor: torch.Tensor, seen: dict[int, int]) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise _Unplanned
    owner = owner_at(tensor)
    shape = (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        index_of(tensor),
        tensor.is_conj(),
        tensor.is_neg(),
    )
    address = data_ptr(tensor)
    if not address:
        return (*shape, -1, -1, owner.__class__)
    storage = id(tensor if owner is None else owner)
    # The distance, and not the place, so that a loop over slices has one plan.
    distance = address - seen.setdefault(storage, address)
    return (*shape, list(seen).index(storage), distance, owner.__class__)


class _Shapes(StandIns):
    """Tensors of the meta device for those of a call.

    Args:
        op: The operator.
        outs: ``id`` of each tensor that the operator may resize.
    """

    def __init__(self, op: Any, outs: set[int]):
        super().__init__(op)
        self.outs = outs

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return like_on_meta(tensor) if id(tensor) in self.outs else meta_of(tensor)

    def other(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return _META
        return None if isinstance(value, torch.Generator) else value


@functools.cache
def _tensors(op: Any) -> list[int]:
    """Return the positions of the arguments that are tensors."""
    return [
        at for at, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor"
    ]


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


def like_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the meta device, which an operator may resize."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _shapes(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results of an operator on tensors of the meta device.

    Raises:
        NoValueError: The shapes of the results depend on values.
        NotImplementedError: torch has no kernel that computes the shapes.
    """
    if op._schema.name in _MAKING_NESTED:
        raise NoValueError(op._schema.name)
    formula = recurrent_networks.FORMULAS.get(op._schema.name.partition("::")[2])
    if formula is not None:
        return formula(*args, **kwargs)
    kwargs = {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
    # A number may stand for a tensor, which only the packet of an operator accepts.
    if any(args[i].__class__ in NUMBERS for i in _tensors(op) if i < len(args)):
        call = op._overloadpacket
    else:
        call = op
    try:
        result = call(*args, **kwargs)
        if op is _BATCH_NORM and _is_by_cudnn(*args):
            return _without_statistics(result)
        return result
    except RuntimeError as error:  # of which NotImplementedError is one
        # Operators of libraries have no such tag; their kernel for fake tensors asks for a size
        # that it does not know.
        if _NEEDS_VALUES.intersection(op.tags) or _SIZE_BY_VALUES in str(error):
            raise NoValueError(op._schema.name) from None
        if not isinstance(error, NotImplementedError):
            raise
        return _shapes_by_fakes(op, args, kwargs)


_BATCH_NORM = torch.ops.aten.native_batch_norm.default


def _is_by_cudnn(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> bool:
    """Return whether cuDNN computes a batch norm that trains nothing.

    Source: ``_select_batch_norm_backend`` in aten/src/ATen/native/Normalization.cpp.
    """
    if training or not policy.stands_for_cuda():
        return False
    given = (weight, bias, mean, variance)
    if any(each is None for each in given) or torch.bfloat16 in (x.dtype, weight.dtype):
        return False
    has_its_dtypes = x.dtype is not torch.float16 or weight.dtype is torch.float32
    return has_its_dtypes and x.dim() >= 3 and len(x) <= 65_535


def _without_statistics(result: Any) -> Any:
    """Return the results of a batch norm as cuDNN's, whose statistics are empty.

    Source: ``cudnn_batch_norm`` in aten/src/ATen/native/cudnn/BatchNorm.cpp.
    """
    output, mean, deviation = result
    return output, mean.new_empty(0), deviation.new_empty(0)


def _shapes_by_fakes(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results of an operator without a meta kernel from fake tensors of the CPU."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    def fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def meta(value: torch.Tensor) -> torch.Tensor:
        # Which the caller refuses.
        return like_on_meta(value) if value.layout is torch.strided else value

    with FakeTensorMode():
        taken, named = pytree.tree_map(fake, (args, kwargs))
        try:
            result = op(*taken, **named)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise NoValueError(op._schema.name) from None
    return pytree.tree_map_only(torch.Tensor, meta, result)
