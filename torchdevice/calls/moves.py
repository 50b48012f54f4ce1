"""On a target in the CPU's memory, tracks which tensors a program believes on the accelerator.

On such a target a move need not do anything, but it must copy where CUDA's would: a write to the
result of ``x.cuda()`` must not change ``x``. A move to the side where a tensor is already must not
copy. So the storages that a program creates, clones or moves are marked with their side,
accelerator or host. Views share their storage, and so its mark.

Results of other operators carry no mark, because following every operator would cost more than the
operators. The rule is therefore: **a move copies unless both sides are known to be the same.** The
rule may make a copy that CUDA would not make, but never shares memory that CUDA would not share.
There are three exceptions, without which programs break. A leaf that requires a gradient stays the
same object where its own side or the requested side is unknown. A module that is moved keeps the
memory of parameters without another holder. Memory that the program shares between processes is the
host's unless it is marked.

A device argument can be ambiguous too: ``torch.device("cuda")`` becomes the CPU's device in a
scope. A scope always returns one object for it, which is recognized by identity; ``x.device`` makes
a new object, whose side is unknown. The string ``"cpu"`` is recognized by identity as well: Python
interns the constant in a program's text, and ``x.device.type`` makes a new string.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.runtime import device_of
from torchdevice.kernel.torch_internals import storage_use_count


class Side(enum.Enum):
    """The side on which the program holds a storage to be.

    The mark ``UNKNOWN`` also keeps a storage without a mark of its own from being taken for the
    host's because it is shared or not resizable.
    """

    HOST = "host"
    DEVICE = "device"
    UNKNOWN = "unknown"


_DEVICE = Side.DEVICE  # reading a member of an enumeration takes longer than a global name
_UNKNOWN = Side.UNKNOWN

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})

_is_tracing = torch._C._is_tracing
_is_profiling = torch._C._autograd._profiler_enabled
# Functorch's wrappers report is_leaf too.
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_DisableTorchDispatch = torch._C._DisableTorchDispatch


# ---- what is known of memory ---------------------------------------------------------------------


def _storage(tensor: Any) -> Any:
    """Return a tensor's storage if it has one; None for other layouts and most subclasses."""
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
    """Return whether tensors of a class own memory and do not wrap other tensors."""
    if not issubclass(cls, torch.Tensor) or issubclass(cls, UninitializedTensorMixin):
        return False
    return cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _mark_of(storage: Any) -> Side | None:
    return getattr(storage, "_torchdevice_side", None)


def mark_storage(storage: Any, side: Side) -> None:
    """Mark a storage with a side.

    The mark is an attribute of the storage's Python object, which torch keeps as long as the
    storage lives.
    """
    storage._torchdevice_side = side


def mark_unmarked(storage: Any, side: Side | None) -> Any:
    """Mark a storage that has no mark yet; None marks it as unknown. Return the storage."""
    if isinstance(storage, torch.UntypedStorage) and _mark_of(storage) is None:
        mark_storage(storage, side or Side.UNKNOWN)
    return storage


def mark(tensor: Any, side: Side | None) -> Any:
    """Mark a tensor's storage with a side, unless ``side`` is None. Return the tensor."""
    # Errors are as in `_storage`: sparse tensors, lazy ones and wrappers of functorch.
    if side is not None:
        try:
            # _storage and mark_storage, inlined: two Python calls less for each new tensor
            storage = tensor.untyped_storage() if type(tensor) in _PLAIN else _storage(tensor)
        except (RuntimeError, NotImplementedError):
            return tensor
        if storage is not None:
            storage._torchdevice_side = side
    return tensor


def side_of(tensor: Any) -> Side | None:
    """Return the side that the program holds a tensor to be on, or None where that is unknown."""
    return _side_of_storage(_storage(tensor))


def _side_of_storage(storage: Any) -> Side | None:
    if storage is None:
        return None
    side = _mark_of(storage)
    # Torch allocates resizable memory; what it imports or shares is not resizable.
    if side is None and (not storage.resizable() or storage.is_shared()):
        return Side.HOST  # memory of NumPy, of a file, of other processes
    return None if side is Side.UNKNOWN else side


# ---- what a device argument means ----------------------------------------------------------------


host_device = functools.cache(device_of.__wrapped__)
"""Returns the one object that stands for a host device which the program itself spelled, and no
device of a runtime.
"""


def spells_host(context: Context, text: Any) -> bool:
    """Return whether a string is the program's spelling of the host's type, not one torch made."""
    # CPython interns constants in a program's text, so identity tells them from texts made later.
    return text is sys.intern(context.device_type)


def side_meant(context: Context, device: Any, target: torch.device | None) -> Side | None:
    """Return the side that a device argument means.

    Args:
        context: The active context.
        device: The argument as the program wrote it.
        target: The device to which the context redirects the argument; None where it does not.
    """
    # The runtime makes each of its devices once, and `x.device` is always another object.
    if target is not None or device is context.runtime.device(0):
        return _DEVICE
    if isinstance(device, str):
        return Side.HOST if spells_host(context, device) else None
    # An operator with another argument where others have a device.
    if not isinstance(device, torch.device):
        return None
    return Side.HOST if device is host_device(device.type, device.index) else None


def device_meaning(context: Context, device: torch.device, side: Side | None) -> torch.device:
    """Return the object for a device from which :func:`side_meant` recognizes ``side``."""
    if side is None or device.type != context.device_type:
        # Another device type, such as meta, has no side.
        return device
    if side is Side.DEVICE:
        return context.devices.current
    return host_device(device.type, device.index)


# ---- moves ---------------------------------------------------------------------------------------


def stays(context: Context, tensor: Any) -> bool:
    """Return whether a move to the accelerator is a no-op that no recorder of calls must see."""
    if (
        context.devices.are_several
        or type(tensor) not in _PLAIN
        or _is_tracing()
        or _is_profiling()
    ):
        return False
    try:  # as `_storage` does it, without its frame
        return getattr(tensor.untyped_storage(), "_torchdevice_side", None) is _DEVICE
    except (RuntimeError, NotImplementedError):
        return False


def moved(
    context: Context, tensor: torch.Tensor, result: torch.Tensor, to: Side | None
) -> torch.Tensor:
    """Return the result of a move: a copy, unless the tensor is known to be there already.

    Args:
        context: The active context.
        tensor: The tensor that is moved.
        result: The result of torch's own move: the tensor itself where torch had nothing to do.
        to: The side to which the tensor is moved; None where that is unknown.
    """
    # Torch has moved or converted: the result has memory of its own.
    if result is not tensor:
        return mark(result, to)
    storage = _storage(tensor)
    # Inlined, since every move of a program comes here.
    side = getattr(storage, "_torchdevice_side", None)
    if side is None or side is _UNKNOWN:
        side = _side_of_storage(storage)
    if side is not None and side is to and not (side is _DEVICE and context.devices.are_several):
        return tensor
    if _is_tracing():
        return tensor  # a graph must not depend on what is known of one example
    return _kept_or_copied(context, tensor, storage, side, to)


def _kept_or_copied(
    context: Context, tensor: torch.Tensor, storage: Any, side: Side | None, to: Side | None
) -> Any:
    """Return the moved tensor if its side is unknown: a copy, or itself if it must not be copied.

    Args:
        context, tensor, to: See :func:`moved`.
        storage: The tensor's storage; None where it has no memory of its own.
        side: The side that it is known to be on; None where that is unknown.
    """
    # A module's move must keep its parameters' memory, or a large model would need it twice.
    if (
        context.thread.moving_module
        and storage is not None
        and isinstance(tensor, torch.nn.Parameter)
    ):
        if _is_exclusive(storage):
            mark_storage(storage, to or Side.UNKNOWN)
            return tensor
    elif tensor.requires_grad and _stays_as_leaf(context, tensor, side, to):
        if side is not None and to is None:
            # On CUDA the result may be a copy on the other side.
            mark_storage(storage, Side.UNKNOWN)
        return tensor
    if storage is None and _moves_its_parts(tensor, to):
        return tensor
    return mark(tensor.clone(), to)


def _moves_its_parts(tensor: torch.Tensor, to: Side | None) -> bool:
    """Return whether a tensor that wraps others, such as a DTensor, moves them itself."""
    of_class = type(tensor) not in _PLAIN and to is not Side.HOST
    return of_class or isinstance(tensor, UninitializedTensorMixin)


def _stays_as_leaf(
    context: Context, tensor: torch.Tensor, side: Side | None, to: Side | None
) -> bool:
    """Return whether a leaf stays the same object, as the program may give it to an optimizer."""
    # Several accelerators are one side, but CUDA copies from one to another.
    may_be_there = side is None or to is None or (side is to and context.devices.are_several)
    return may_be_there and tensor.is_leaf and not _is_wrapped(tensor)


def moved_among_devices(context: Context, tensor: Any, result: Any) -> Any:
    """Return a move's result if the target's one device is several of the program's.

    The tensor may be on another device of the program than the one it is moved to, and is copied as
    on a CPU target.

    Args:
        context: The active context. Where it folds no devices, torch's result is returned.
        tensor: The tensor that is moved.
        result: The result of torch's own move: the tensor itself where torch had nothing to do.
    """
    # Identity: a result that is another tensor has been copied already.
    if not context.devices.are_folded or result is not tensor or not _is_on_target(context, tensor):
        return result
    return moved(context, tensor, result, None)


def _is_on_target(context: Context, tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return context.devices.is_targets(tensor.device)


def followed(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the result of a clone or a change of dtype, marked with the side of its source."""
    return result if result is source else mark(result, side_of(source))


def _is_exclusive(storage: Any) -> bool:
    """Return whether one tensor alone holds a storage: no view, snapshot or NumPy array does."""
    # `le`: fewer references than usual are no reason to copy.
    return storage.resizable() and all(map(operator.le, _references(storage), _own_references()))


def _references(storage: Any) -> tuple[int, int]:
    # `getrefcount` counts its variable and argument too, and so does `_own_references`.
    return int(storage_use_count(storage._cdata)), sys.getrefcount(storage)


def _own_references() -> tuple[int, int]:
    """Return how many references C++ and Python hold to a storage that only one tensor uses.

    They are counted at each call, because a debugger or a profiler adds references of its own.
    """
    # The storage passes through as many variables and calls as from moved() to _references().

    def found(tensor: torch.Tensor) -> tuple[int, int]:
        storage = _storage(tensor)
        return passed_on(storage)

    def passed_on(storage: Any) -> tuple[int, int]:
        # As an argument it has one reference more, as in `_kept_or_copied` and `_is_exclusive`.
        return called(storage)

    def called(storage: Any) -> tuple[int, int]:
        return _references(storage)

    with _DisableTorchDispatch():  # no mode of the program sees this tensor
        return found(torch.empty(1, device="cpu"))


# ---- creation ------------------------------------------------------------------------------------


def created(
    context: Context, source: Any, result: Any, asked: Any, target: torch.device | None
) -> Any:
    """Mark and return a tensor created with a device; if it is an input, the call was a move.

    Args:
        context: The active context.
        source: The data or the tensor that the function was given.
        result: The tensor that the function returned.
        asked: The device argument as the program wrote it.
        target: The device to which the context redirects the argument; None where it does not.
    """
    side = side_meant(context, asked, None) if target is None else _DEVICE
    return moved(context, source, result, side) if result is source else mark(result, side)


def created_by_default(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    """Mark a tensor that was created without a device argument, and return it.

    Args:
        func: The function that created the tensor.
        args: The function's arguments.
        kwargs: The function's keyword arguments.
        result: The tensor.
    """
    storage = _storage(result)
    # A default device may have marked it.
    if storage is not None and _mark_of(storage) is None:
        side = _default_side(func, args, kwargs)
        if side is not None:
            storage._torchdevice_side = side
    return result


def _default_side(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Side | None:
    """Return the side of a tensor created without a device: that of the inputs, or the host.

    None stands for an unknown side.
    """
    # Only the first argument can be the imitated tensor; another one makes the side unknown.
    imitated = args[0] if args else kwargs.get("input")
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            return side_of(value) if value is imitated and _makes_alike(func) else None
    return Side.HOST


@functools.cache
def _makes_alike(func: Any) -> bool:
    """Return whether a function creates its tensor on the device of its first argument."""
    # Operators are named `new_zeros.default`, functions `new_zeros`.
    name = getattr(func, "__name__", "").partition(".")[0]
    return (
        name.startswith("new")
        or name.endswith("_like")
        or name in ("tensor", "as_tensor", "asarray")
    )


def shared(source: Any, result: Any) -> Any:
    """Return an imported tensor, marked with the side of ``source``, whose memory it shares."""
    return mark(result, side_of(source) or Side.UNKNOWN)


def made_of(context: Context, source: Any, result: torch.Tensor, to: Side | None) -> torch.Tensor:
    """Return a tensor made from data: a copy where torch shared memory that CUDA would have copied.

    Args:
        context: The active context.
        source: The data: a tensor, an array of NumPy, numbers.
        result: The tensor that torch made from the data.
        to: The requested side; None where that is unknown.
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
        # Memory of NumPy is not resizable, and torch has shared it.
        shares, side = not storage.resizable(), Side.HOST
    if shares and side is not None and side is to:
        return result
    return mark(result.clone() if shares else result, to)
