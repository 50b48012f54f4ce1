"""On a target that shares the CPU's memory: which tensors the program holds to be on the accelerator, which on the CPU.

There a move has nothing to do, and yet it must copy where CUDA's would: who writes to the result of ``x.cuda()`` must
not change ``x``. A move to where a tensor is must not copy. So storages are marked with the side the program put them
on: what it created, cloned or moved there. Views share their storage, and so its mark.

Results of other operators carry no mark, because following every operator would cost more than the operators. The rule
is therefore: **a move copies unless both sides are known to be the same.** It errs by a copy that CUDA would not make,
not by sharing memory that CUDA would not share. Three exceptions keep programs whole. A leaf that requires a gradient
stays itself where its side or the one it is moved to is unknown. A module that is moved keeps the memory of parameters
that nobody else holds. And memory that the program shares between processes is the host's unless it is marked.

A device argument can be ambiguous too: ``torch.device("cuda")`` becomes the CPU's device in a scope. The object that a
scope makes of it is always the same one, so it is known by identity; ``x.device`` makes a new object, whose side is
unknown. The same goes for the string ``"cpu"``: the one in the program's text is a constant that Python keeps once, and
``x.device.type`` makes a new one.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin

from torchdevice.context import Context
from torchdevice.torch_internals import require


class Side(enum.Enum):
    """Where the program holds a storage to be. A mark that says unknown stands against what memory says by itself."""

    HOST = "host"
    DEVICE = "device"
    UNKNOWN = "unknown"


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})

_is_tracing = require(torch._C, "_is_tracing")
_is_wrapped = require(torch._C._functorch, "is_functorch_wrapped_tensor")  # what functorch differentiates is a leaf too
_use_count = require(torch._C, "_storage_Use_Count")


# ---- what is known of memory -----------------------------------------------------------------------------------------


def _storage(tensor: Any) -> Any:
    """Return the storage of a tensor that has memory of its own; None for other layouts and most subclasses."""
    try:
        if type(tensor) in _PLAIN:
            return tensor.untyped_storage()
        cls: Any = type(tensor)
        if not _has_memory(cls):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse, lazy, or a wrapper of functorch
        return None


@functools.cache
def _has_memory(cls: Any) -> bool:
    """Return whether tensors of a subclass are tensors with memory, and no wrappers around other ones."""
    return (
        issubclass(cls, torch.Tensor)
        and not issubclass(cls, UninitializedTensorMixin)
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def mark_storage(storage: Any, side: Side) -> None:
    """Note the side of a storage.

    It is an attribute of the storage's object in Python, which torch keeps for as long as the storage lives.
    """
    storage._torchdevice_side = side


def mark_unmarked(storage: Any, side: Side | None) -> Any:
    """Note the side of a storage that has no mark, or that it is unknown. Return the storage."""
    if isinstance(storage, torch.UntypedStorage) and _noted(storage) is None:
        mark_storage(storage, side or Side.UNKNOWN)
    return storage


def _noted(storage: Any) -> Side | None:
    return getattr(storage, "_torchdevice_side", None)


def mark(tensor: Any, side: Side | None) -> Any:
    """Note the side of a tensor's storage; nothing where the side is unknown. Return the tensor."""
    if side is not None:
        storage = _storage(tensor)
        if storage is not None:
            storage._torchdevice_side = side  # as mark_storage does, with a call less
    return tensor


def side_of(tensor: Any) -> Side | None:
    """Return the side that the program holds a tensor to be on, or None where that is unknown."""
    storage = _storage(tensor)
    return None if storage is None else _side_of_storage(storage)


def _side_of_storage(storage: Any) -> Side | None:
    side = _noted(storage)
    if side is None and (not storage.resizable() or storage.is_shared()):
        return Side.HOST  # memory of NumPy, of a file, of other processes
    return None if side is Side.UNKNOWN else side


# ---- what a device argument means ------------------------------------------------------------------------------------


@functools.cache
def host_device(device_type: str, index: int | None) -> torch.device:
    """Return the one object that stands for a device of the host that the program spelled itself."""
    with torch._C.DisableTorchFunction():
        return torch.device(device_type) if index is None else torch.device(device_type, index)


def spells_host(context: Context, text: Any) -> bool:
    """Return whether a string is the host's device type as the program wrote it, not one that torch made."""
    return text is sys.intern(context.device_type)


def side_meant(context: Context, device: Any, target: torch.device | None) -> Side | None:
    """Return the side that a device argument means.

    Args:
        context: The active context.
        device: The argument as the program wrote it.
        target: What the context makes of it; None where it is left alone.
    """
    if target is not None or device is context.runtime.device(0):
        return Side.DEVICE
    if isinstance(device, str):
        return Side.HOST if spells_host(context, device) else None
    if not isinstance(device, torch.device):  # an operator that has something else in the place of a device
        return None
    return Side.HOST if device is host_device(device.type, device.index) else None


def device_meaning(context: Context, device: torch.device, side: Side | None) -> torch.device:
    """Return the object for a device by which :func:`side_meant` knows a side."""
    if side is None or device.type != context.device_type:
        return device
    return context.target if side is Side.DEVICE else host_device(device.type, device.index)


# ---- moves -----------------------------------------------------------------------------------------------------------


def moved(context: Context, tensor: torch.Tensor, result: torch.Tensor, to: Side | None) -> torch.Tensor:
    """Return the result of a move: a copy, unless the tensor is known to be there already.

    Args:
        context: The active context.
        tensor: What is moved.
        result: What torch made of it: the tensor itself where torch had nothing to do.
        to: The side it is moved to.
    """
    if result is not tensor:
        return mark(result, to)
    if _is_tracing():
        return tensor  # a graph must not depend on what is known of one example
    storage = _storage(tensor)
    side = None if storage is None else _side_of_storage(storage)
    if side is not None and side is to and not (side is Side.DEVICE and _has_several_devices(context)):
        return tensor
    if context.thread.moving_module and storage is not None and isinstance(tensor, torch.nn.Parameter):
        if _is_exclusive(storage):
            mark_storage(storage, to or Side.UNKNOWN)
            return tensor
    elif _stays_leaf(context, tensor, side, to):
        if side is not None and to is None:
            mark_storage(storage, Side.UNKNOWN)  # on CUDA the result may be a copy, and on the other side
        return tensor
    if storage is None and _decides_itself(tensor, to):
        return tensor
    return mark(tensor.clone(), to)


def _stays_leaf(context: Context, tensor: torch.Tensor, side: Side | None, to: Side | None) -> bool:
    """Return whether a tensor is a leaf that may be where it is moved to, so that an optimizer may be given it."""
    is_ambiguous = side is None or to is None or (side is to and _has_several_devices(context))
    return is_ambiguous and tensor.requires_grad and tensor.is_leaf and not _is_wrapped(tensor)


def _has_several_devices(context: Context) -> bool:
    """Return whether the program sees several accelerators. They are one side, but between two of them CUDA copies."""
    return (context.options.devices or 1) > 1


def _decides_itself(tensor: torch.Tensor, to: Side | None) -> bool:
    """Return whether a tensor without memory of its own says by itself what a move is, as DTensor and lazy ones do."""
    return isinstance(tensor, UninitializedTensorMixin) or (type(tensor) not in _PLAIN and to is not Side.HOST)


def followed(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the result of a clone or a change of dtype, which stays on the side of its source."""
    return result if result is source else mark(result, side_of(source))


def _is_exclusive(storage: Any) -> bool:
    """Return whether nobody but one tensor holds some memory: no view, no snapshot, no array of NumPy."""
    return storage.resizable() and all(map(operator.le, _references(storage), _own_references()))


def _references(storage: Any) -> tuple[int, int]:
    return int(_use_count(storage._cdata)), sys.getrefcount(storage)


def _own_references() -> tuple[int, int]:
    """Return the references to the storage of a tensor that is held by one variable, in C++ and in Python.

    Counted each time, because a debugger or a profiler adds references of its own.
    """

    def found(tensor: torch.Tensor) -> tuple[int, int]:
        storage = _storage(tensor)
        return called(storage)

    def called(storage: Any) -> tuple[int, int]:
        return _references(storage)

    return found(torch.empty(1, device="cpu"))


# ---- creation --------------------------------------------------------------------------------------------------------


def created(context: Context, source: Any, result: Any, to: Side | None) -> Any:
    """Note where a new tensor is, for which a device was asked; some functions return what they were given instead.

    Args:
        context: The active context.
        source: What the tensor was made of or made like.
        result: The tensor.
        to: The side that was asked for.
    """
    return moved(context, source, result, to) if result is source else mark(result, to)


def created_by_default(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Note where a new tensor is, for which no device was asked.

    Args:
        func: The function that made it.
        args: The function's arguments.
        kwargs: The function's keyword arguments.
        result: The tensor.
    """
    storage = _storage(result)
    if storage is not None and _noted(storage) is None:  # a default device may have marked it
        side = _default_side(func, args, kwargs)
        if side is not None:
            storage._torchdevice_side = side
    return result


def _default_side(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Side | None:
    """Return the side on which a function makes a tensor by itself: the host, or that of a tensor it is given."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return side_of(value) if value is args[0] and _makes_alike(func) else None
    if kwargs:
        for value in kwargs.values():
            if isinstance(value, torch.Tensor):
                return side_of(kwargs.get("input")) if not args and _makes_alike(func) else None
    return Side.HOST


@functools.cache
def _makes_alike(func: Any) -> bool:
    """Return whether a function makes its tensor where the one is that it is given first."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return name.startswith("new") or name.endswith("_like") or name in ("tensor", "as_tensor", "asarray")


def shared(source: Any, result: Any) -> Any:
    """Return a tensor that another library handed over: it is where the tensor is whose memory it has."""
    if isinstance(result, torch.Tensor):
        side = side_of(source) if isinstance(source, torch.Tensor) else None
        return mark(result, side or Side.UNKNOWN)
    return result


def made_of(context: Context, source: Any, result: torch.Tensor, to: Side | None) -> torch.Tensor:
    """Return a tensor made of data on a device: a copy where torch took memory that CUDA would have copied.

    Args:
        context: The active context.
        source: The data: a tensor, an array of NumPy, numbers.
        result: What torch made of it.
        to: The side that was asked for.
    """
    if result is source:
        return moved(context, source, result, to)
    storage = _storage(result)
    if storage is None:
        return result
    if isinstance(source, torch.Tensor):
        own = _storage(source)
        shares = own is not None and own._cdata == storage._cdata
        side = _side_of_storage(storage)
    else:
        shares, side = not storage.resizable(), Side.HOST
    return result if shares and side is not None and side is to else mark(result.clone() if shares else result, to)
