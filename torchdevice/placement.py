"""On a target that shares the CPU's memory: which tensors the program holds to be on the accelerator, which on the CPU.

There a move has nothing to do, and yet it must copy where CUDA's would: who writes to the result of ``x.cuda()`` must
not change ``x``. A move to where a tensor is must not copy. So storages are marked with the side the program put them
on: what it created or moved there. Views share their storage, and so its mark.

Results of operators carry no mark, because following every operator would cost more than the operators. The rule is
therefore: **a move copies unless both sides are known to be the same.** It errs by a copy that CUDA would not make,
never by sharing memory that CUDA would not share. Two exceptions keep programs whole: a leaf that requires a gradient,
and whose side is unknown, stays itself; and a module that is moved keeps memory that nobody but the module holds.

A device argument can be ambiguous too: ``torch.device("cuda")`` becomes the CPU's device in a scope. The object that a
scope makes of it is always the same one, so it is known by identity; ``x.device`` makes a new object, whose side is
unknown.
"""

from __future__ import annotations

import enum
import functools
import weakref
from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.torch_internals import require


class Side(enum.Enum):
    """Where the program holds a storage to be."""

    HOST = "host"
    DEVICE = "device"


class _Mark(weakref.ref):  # type: ignore[type-arg]
    """The side of a storage, for as long as the storage lives."""

    __slots__ = ("identity", "side")
    identity: int
    side: Side


_marks: dict[int, _Mark] = {}

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})

_is_tracing = require(torch._C, "_is_tracing")
_use_count = require(torch._C, "_storage_Use_Count")


def _forget(mark: _Mark) -> None:
    if _marks.get(mark.identity) is mark:
        del _marks[mark.identity]


def _storage(tensor: Any) -> Any:
    """Return the storage of a tensor that has memory of its own; None for a subclass and for other layouts."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a wrapper of functorch, a quantized or lazy tensor
        return None


def mark_storage(storage: Any, side: Side) -> None:
    """Note the side of a storage."""
    identity = storage._cdata
    mark = _marks.get(identity)
    if mark is None or mark() is not storage:
        mark = _Mark(storage, _forget)
        mark.identity = identity
        mark.side = side
        _marks[identity] = mark
    else:
        mark.side = side


def mark(tensor: Any, side: Side | None) -> Any:
    """Note the side of a tensor's storage; nothing where the side is unknown. Return the tensor."""
    if side is not None:
        storage = _storage(tensor)
        if storage is not None:
            mark_storage(storage, side)
    return tensor


def side_of(tensor: Any) -> Side | None:
    """Return the side that the program holds a tensor to be on, or None where that is unknown."""
    storage = _storage(tensor)
    if storage is None:
        return None
    mark = _marks.get(storage._cdata)
    if mark is not None and mark() is storage:
        return mark.side
    if not storage.resizable() or storage.is_shared():
        return Side.HOST  # memory of NumPy, of a file, of other processes
    return None


@functools.cache
def host_device(device_type: str, index: int | None) -> torch.device:
    """Return the one object that stands for a device of the host that the program spelled itself."""
    with torch._C.DisableTorchFunction():
        return torch.device(device_type) if index is None else torch.device(device_type, index)


def side_meant(context: Context, device: Any, target: torch.device | None) -> Side | None:
    """Return the side that a device argument means.

    Args:
        context: The active context.
        device: The argument as the program wrote it.
        target: What the context makes of it; None where it is left alone.
    """
    if target is not None or device is context.target:
        return Side.DEVICE
    if isinstance(device, str):
        return Side.HOST if device.partition(":")[0] == context.device_type else None
    return Side.HOST if device is host_device(device.type, device.index) else None


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
    side = side_of(tensor)
    if side is not None and side is to:
        return tensor
    if (side is None or to is None) and tensor.is_leaf and tensor.requires_grad:
        return mark(tensor, to)
    if context.thread.moving_module and _is_exclusive(tensor):
        return mark(tensor, to)
    if type(tensor) not in _PLAIN and to is not Side.HOST:
        return tensor  # a subclass, such as DTensor, decides by itself what a move is
    return mark(tensor.clone(), to)


def copied(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the result of a change of dtype, which stays on the side of its source."""
    return result if result is source else mark(result, side_of(source))


def created(result: Any, source: Any, to: Side | None, by_default: bool) -> Any:
    """Note where a new tensor is.

    Args:
        result: The new tensor.
        source: What it was made of or made like; another tensor is followed where no device was asked for.
        to: The side that was asked for.
        by_default: That no device was asked for.
    """
    if by_default:
        to = side_of(source) if isinstance(source, torch.Tensor) else Side.HOST
    return mark(result, to)


def shares_memory(result: torch.Tensor, source: Any) -> bool:
    """Return whether a new tensor has memory that somebody else has too: the source's, NumPy's, a file's."""
    storage = _storage(result)
    if storage is None:
        return False
    if isinstance(source, torch.Tensor):
        own = _storage(source)
        return own is not None and own._cdata == storage._cdata
    return not storage.resizable()


def _is_exclusive(tensor: torch.Tensor) -> bool:
    """Return whether nobody but this tensor holds its memory: no view, no snapshot, no array of NumPy."""
    storage = _storage(tensor)
    return storage is not None and storage.resizable() and _use_count(storage._cdata) <= _own_uses()


@functools.cache
def _own_uses() -> int:
    """Return the number of references to the storage of a tensor that is held by one variable."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return int(_use_count(storage._cdata))
