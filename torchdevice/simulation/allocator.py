"""The storages of simulated devices: the block of each, and the CPU tensor behind each tensor of a device.

Every result of an operator gets a block of the device's memory before the program gets the result, and loses it when
its storage is freed. So the figures of the device's allocator are those of the memory that the program holds; they
exclude what a kernel needs while it runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from torchdevice import thread_state
from torchdevice.devices.allocation_events import Block, Observer
from torchdevice.simulation import enforcement, memory_blocks
from torchdevice.simulation.caching_allocator import Device
from torchdevice.simulation.relabel import on_cpu, on_device

_conj = torch._C._VariableFunctions._conj


_neg_view = torch._C._VariableFunctions._neg_view


_as_strided = torch._C._VariableFunctions.as_strided


_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


_devices: dict[int, Device] = {}


def device(index: int) -> Device:
    """Return the memory of the device with this index."""
    found = _devices.get(index)
    if found is None:
        found = Device(index, enforcement.memory_limits)
        found.tell = functools.partial(_tell, index)
        found = _devices.setdefault(index, found)
    return found


def _tell(index: int, action: str, address: int, size: int, stream: int) -> None:
    for observer in observers:
        observer.segment_changed(action, Block(index, address, size, size), stream)


def devices() -> list[Device]:
    """Return the memory of each device that was used."""
    return list(_devices.values())


def host_waited() -> None:
    """Note that the host has waited for a device: memory that other streams used may be reused."""
    for each in _devices.values():
        if each.has_pending:
            each.host_waited()


def _renew_locks() -> None:
    for each in devices():
        each.renew_lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_locks)


class _Owner(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage of the device, with the CPU tensor whose memory the storage has.

    Every CPU tensor that a kernel gets for a tensor of this storage is ``tensor`` or a view of it. So torch's kernels
    see which of their arguments overlap, and refuse or copy as they do on the CPU.

    Attributes:
        address: The address of the memory; for a storage that was resized to 0 a negative number of its own.
        block: The block of the device's memory; None for a storage that was resized to 0.
        freed: ``Device.freed`` of the storage's device.
        index: The index of the storage's device.
        tensor: The CPU tensor.
        view: The last view of ``tensor`` that a kernel got.
        viewer: The ``_cdata`` of the only tensor of the device that may get ``view`` again; 0 where every tensor with
            the view's address, dtype, shape and strides may.
    """

    __slots__ = ("address", "block", "freed", "index", "tensor", "view", "viewer")
    address: int
    block: memory_blocks.Block | None
    freed: deque[memory_blocks.Block]
    index: int
    tensor: torch.Tensor
    view: torch.Tensor
    viewer: int


_owners: dict[int, _Owner] = {}
"""Address of the memory -> its storage on the device."""


observers: list[Observer] = []
"""The observers of every allocation and deallocation, called in the thread where it happens."""


def forget(observer: Observer) -> None:
    """Remove an observer."""
    observers[:] = [each for each in observers if each is not observer]


def _ended(owner: _Owner) -> None:
    if _owners.get(owner.address) is owner:
        del _owners[owner.address]
    _freed(owner)


def _freed(owner: _Owner) -> None:
    if owner.block is None:
        return
    owner.freed.append(owner.block)
    for observer in observers:
        observer.freed(owner.address)


def blocks(index: int) -> dict[memory_blocks.Block, int]:
    """Return the blocks of a device that are in use, with the address of the values of each."""
    owners = [owner for owner in list(_owners.values()) if owner.index == index]
    return {owner.block: owner.address for owner in owners if owner.block is not None}


def shown(index: int, block: memory_blocks.Block, address: int) -> Block:
    """Return a block in use as observers see it."""
    return Block(index, address, block.size, block.requested, block.address)


def block_of(storage: Any) -> memory_blocks.Block | None:
    """Return the block of a storage; None where it has no memory of a device."""
    owner = _owners.get(storage.data_ptr())
    return None if owner is None else owner.block


class _Meant(threading.local):
    """The device that C++ means where it names none: while it makes a sparse tensor, that of the tensor."""

    index = 0


meant = _Meant()


@contextlib.contextmanager
def meaning(index: int) -> Iterator[None]:
    """Let a device without an index be this one, for this thread."""
    before, meant.index = meant.index, index
    try:
        yield
    finally:
        meant.index = before


def fresh(result: torch.Tensor, index: int) -> torch.Tensor:
    """Return a new tensor of device ``index`` in the memory of ``result``, a CPU tensor that nobody else uses.

    Raises:
        TypeError: The active profile does not support the dtype.
        torch.OutOfMemoryError: The tensor would exceed the active scope's memory limit.
    """
    if enforcement.watching:
        enforcement.check_dtype(result.dtype)
    if result.dtype in _COMPLEX and result.is_conj():
        return _conj(fresh(_conj(result), index))
    requested = result.nbytes
    if not requested:
        return on_device(result, index)
    address = result.data_ptr()
    known = _owners.get(address)
    if known is not None:
        storage, view = known(), on_device(result, index)
        if storage is not None and view.untyped_storage().nbytes() <= storage.nbytes():
            # The CPU kernel returned an argument's memory, so the result shares the argument's storage here too.
            return set_storage(view, storage, 0, result.shape, result.stride())
    on = _devices.get(index) or device(index)
    block = on.allocate(requested, _stream(index))
    tensor = on_device(result, index)
    _own(_Owner(tensor.untyped_storage(), _ended), on, result, address, block)
    return tensor


def _stream(index: int) -> int:
    """Return the id of this thread's current stream on a device."""
    context = thread_state.state.context
    return context.thread.streams.get(index, 0) if context is not None else 0


def _own(owner: _Owner, on: Device, memory: torch.Tensor, address: int, block: memory_blocks.Block | None) -> None:
    """Note that a storage of a device has the memory of a CPU tensor, which begins at ``address``."""
    owner.address = address
    owner.index = on.index
    owner.block = block
    owner.freed = on.freed
    owner.tensor = owner.view = memory
    owner.viewer = 0
    _owners[address] = owner
    if observers and block is not None:
        seen = shown(on.index, block, address)
        for observer in observers:
            observer.allocated(seen)


def take_memory(storage: Any, index: int, memory: torch.Tensor) -> torch.Tensor | None:
    """Count a storage of device ``index`` as having the memory of ``memory``, a CPU tensor, from now on.

    Returns:
        The CPU tensor whose memory it had; None where it had none.

    Raises:
        torch.OutOfMemoryError: The memory would exceed the active scope's memory limit. Nothing has changed then.
    """
    on = device(index)
    block = on.allocate(memory.nbytes, _stream(index)) if memory.nbytes else None
    emptied = -storage._cdata
    owner = _owners.pop(storage.data_ptr() or emptied, None)
    if owner is None:
        owner, old = _Owner(storage, _ended), None
    else:
        old = owner.tensor
        _freed(owner)
    _own(owner, on, memory, memory.data_ptr() if memory.nbytes else emptied, block)
    return old


set_storage = functools.partial(torch.ops.aten.set_.source_Storage_storage_offset._op_dk, torch._C.DispatchKey.CPU)
"""``Tensor.set_`` with a storage, by its CPU kernel, which accepts tensors of the device too."""


def with_bits(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of ``memory`` with the conjugate and negative bits of ``like``."""
    if like.is_conj():
        memory = _conj(memory)
    return _neg_view(memory) if like.is_neg() else memory


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares memory with a simulated tensor, without conjugate and negative bits.

    The caller must not resize the result: it may be the tensor that owns the memory.
    """
    address, dtype, shape, stride = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    owner = _owners.get(address)
    if owner is not None:
        own = owner.tensor
        if own.dtype is dtype and own.shape == shape and own.stride() == stride:
            return own
    else:
        owner = _owners.get(tensor.untyped_storage().data_ptr())
        if owner is None:  # a storage without memory
            return on_cpu(tensor)
    view = owner.view
    alike = view.data_ptr() == address and view.dtype is dtype and view.shape == shape and view.stride() == stride
    if alike and (not owner.viewer or owner.viewer == tensor._cdata):
        return view
    view = owner.view = _view(owner, tensor)
    owner.viewer = 0 if _is_dense(view) else tensor._cdata
    return view


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether torch's overlap checks compare this tensor with others by memory range.

    They compare a tensor with gaps between its elements by identity alone, so it needs a view of its own. The result
    may be False for a dense tensor, which then gets its own view too.
    """
    return tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride() == (1, tensor.shape[0]))


def resizable_memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new CPU tensor that shares memory with a simulated tensor, for a kernel that may resize it.

    The memory cannot grow: a kernel that needs more than the block holds raises an error with the text
    :data:`CANNOT_GROW`.
    """
    owner = _owners.get(tensor.untyped_storage().data_ptr())
    if owner is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    _fix(owner)
    return _view(owner, tensor)


CANNOT_GROW = "Trying to resize storage that is not resizable"
"""The beginning of torch's error for a resize of memory that cannot be resized."""


def _fix(owner: _Owner) -> None:
    """Make the memory of a block impossible to resize, by a DLPack import: torch never resizes imported memory."""
    if owner.tensor.untyped_storage().resizable():
        _import_again(owner)


def _import_again(owner: _Owner) -> None:
    """Import a block's CPU tensor by DLPack: the new storage begins where the tensor begins and cannot be resized."""
    with torch.inference_mode(owner.tensor.is_inference()):
        owner.tensor = owner.view = on_cpu(owner.tensor)
    owner.viewer = 0


def _view(owner: _Owner, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a block's CPU tensor with the dtype, shape, strides and offset of a simulated tensor."""
    if owner.tensor.storage_offset():  # the kernel's result was part of a larger storage, and the block begins there
        _import_again(owner)
    own = owner.tensor
    if own.is_inference() and not tensor.is_inference():  # torch refuses writes to views of an inference tensor
        return on_cpu(tensor)
    if own.dtype is tensor.dtype:
        return _as_strided(own, tensor.shape, tensor.stride(), tensor.storage_offset())
    view = torch.empty(0, dtype=tensor.dtype)
    return set_storage(view, own.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
