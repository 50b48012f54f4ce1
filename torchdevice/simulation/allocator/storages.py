"""Storages of simulated devices: each one's block, and the CPU tensor behind each tensor.

Every result of an operator gets a block of the device's memory before the program gets the result,
and loses it when its storage is freed. So the figures of the device's allocator are those of the
memory that the program holds; they exclude what a kernel needs while it runs.
"""

from __future__ import annotations

import _thread
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchdevice.errors import NoValueError
from torchdevice.kernel import thread_state
from torchdevice.kernel.devices.device_memory import Block
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.journal.callers import Site
from torchdevice.kernel.lowlevel.dlpack_alias import on_cpu, on_device, without_values
from torchdevice.kernel.python.per_thread import PerThread, having
from torchdevice.kernel.stand_ins import conj, extent, with_bits
from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.simulation import machine, policy
from torchdevice.simulation.allocator import kept_memory, memory_blocks
from torchdevice.simulation.allocator.caching_allocator import Device
from torchdevice.simulation.machine import Machine
from torchdevice.simulation.refusals.cuda_errors import ILLEGAL_ADDRESS

_as_strided = torch._C._VariableFunctions.as_strided


# Global names, read at every argument of every kernel.
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


def device(index: int) -> Device:
    """Return the memory of the device with this index on the current machine."""
    memory = machine.current().memory
    found: Device | None = memory.get(index)
    if found is None:
        context = thread_state.state.context
        serves = context is not None and context.policy is not None and context.policy.native
        kind = native.Device if serves else Device
        found = kind(index, policy.memory_limits, policy.error_of_mps, machine.current().observers)
        # Before other threads can see it.
        found.live = blocks
        found = memory.setdefault(index, found)
    return found


def host_waited() -> None:
    """Note that the host has waited for a device: memory that other streams used may be reused."""
    for each in list(machine.current().memory.values()):
        if each.has_pending:
            each.host_waited()


class StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage of the device, with the CPU tensor in whose memory it is.

    Make it by :func:`_reference`, which lets the device note the end of the storage.

    Every CPU tensor that a kernel gets for a tensor of this storage is ``tensor`` or a view of it.
    So torch's kernels see which of their arguments overlap, and refuse or copy as they do on the
    CPU.

    Attributes:
        address: The address of the memory; for a storage that was resized to 0 a negative number of
            its own.
        block: The block of the device's memory; None for a storage that was resized to 0.
        on: The memory of the storage's device.
        tensor: The CPU tensor.
        view: The last view of ``tensor`` that a kernel got.
        viewer: The ``_cdata`` of the only tensor of the device that may get ``view`` again; 0 where
            every tensor with the view's address, dtype, shape and strides may.
        watcher: Another reference, which releases a large storage's memory, or that of one with
            observers, at once.
    """

    __slots__ = ("address", "block", "on", "tensor", "view", "viewer", "watcher")
    address: int
    block: memory_blocks.Block | None
    on: Device
    tensor: torch.Tensor
    view: torch.Tensor
    viewer: int
    watcher: Any

    def release(self) -> None:
        """Give the memory and the block back: the storage has ended."""
        address = self.address
        if _owners.get(address) is self:
            if address in _twins:
                _give_up(address)
            else:
                del _owners[address]
        block, self.block = self.block, None
        if block is not None:
            self.on.freed.append(block)
            for observer in self.on.observers:
                observer.freed(address)

    def tell_allocated(self) -> None:
        """Tell the observers that the storage has its block."""
        if self.block is not None:
            seen = shown(self.on.index, self.block, self.address)
            for observer in self.on.observers:
                observer.allocated(seen)


class KnownRef(StorageRef):
    """A reference to a storage whose address the program has read (:func:`keep_address`).

    Its device keeps the memory for the next tensor that gets the block.
    """

    __slots__ = ()

    def release(self) -> None:
        block = self.block
        memory = self.tensor.untyped_storage()
        is_shared = self.address in _twins
        super().release()
        if block is not None and not is_shared:
            kept_memory.keep(self.on.kept, block.address, memory)


class AliasRef(StorageRef):
    """A reference to a storage without a block, which shares another's memory (:func:`twin`)."""

    __slots__ = ()

    def release(self) -> None:
        for table in (_twins, _owners):
            if table.get(self.address) is self:
                del table[self.address]


class NativeRef(StorageRef):
    """A reference to a storage made by C++, which holds the block, once a Python kernel gets it.

    Attributes:
        number: The number of the storage's memory in C++.
    """

    __slots__ = ("number",)
    number: int

    @property
    def block(self) -> memory_blocks.Block | None:  # type: ignore[override]
        return self.on.held.get(self.number, (None,))[0]

    @block.setter
    def block(self, block: memory_blocks.Block | None) -> None:
        """Do nothing: C++ gives the block back when the storage ends."""

    def release(self) -> None:
        if _owners.get(self.address) is self:
            _give_up(self.address)


native: Any = None
"""What knows the storages that C++ makes (``native/serving.py``); None as long as there are none.
"""


class MetaRef(StorageRef):
    """The same for a storage without values.

    Attributes:
        meta: A tensor of torch's meta device, instead of the CPU tensor.
        forgotten: The CPU tensor of a storage that had values. Its memory has the storage's
            address, and a storage that was resized does not keep it.
    """

    __slots__ = ("forgotten", "meta")
    forgotten: torch.Tensor | None
    meta: torch.Tensor

    def release(self) -> None:
        _by_meta.pop(self.meta.untyped_storage()._cdata, None)
        super().release()


def _reference(
    storage: Any, on: Device, memory: torch.Tensor, kind: type[StorageRef] = StorageRef
) -> Any:
    """Return the reference to a storage of a device that has the memory of a CPU tensor.

    What Python calls at the end of the storage is a function in C: an interrupt in a function in
    Python could lose the block. A large storage, and one under observers, has a second reference
    that calls such a function besides. It was made before the first, so Python calls it after.
    """
    watcher = None
    if memory.nbytes >= LARGE or on.observers:
        watcher = weakref.ref(storage, functools.partial(_release, on))
    owner = kind(storage, on.ended.append)
    owner.block = None
    owner.on = on
    owner.tensor = memory
    owner.view = memory
    owner.viewer = 0
    owner.watcher = watcher
    return owner


LARGE = 1 << 20
"""From how many bytes on a storage's memory is released when the storage ends. That of a smaller
one is released by the next kernel or the end of the scope, which saves the time of a call.
"""


def _release(on: Device, reference: object) -> None:
    """Release the memory of the storages that have ended."""
    try:
        on.release_ended()
    except KeyboardInterrupt:
        # Python would print an error of this function, and go on. So the interrupt comes again.
        _thread.interrupt_main()


def _own(owner: StorageRef, address: int, block: memory_blocks.Block | None) -> None:
    """Note that a storage of a device has memory, which begins at ``address``."""
    owner.address, owner.block = address, block
    _owners[address] = owner
    owner.tell_allocated()


_owners: dict[int, StorageRef] = {}
"""Address of the memory -> its storage on the device."""


def observe(observer: Observer, on: Machine) -> Callable[[], None]:
    """Add an observer of a machine's memory. Storages freed earlier are not reported.

    Returns:
        A function that removes the observer. It may be called again.
    """
    for each in on.memory.values():
        # Earlier ends must not be reported to an observer who has not seen the beginnings.
        each.release_ended()
    on.observers.append(observer)
    for each in on.memory.values():
        each.lead()
    return functools.partial(forget, observer, on)


def forget(observer: object, on: Machine) -> None:
    """Remove an observer of a machine's memory. May be called again."""
    # In place, since the allocator holds this very list.
    on.observers[:] = [each for each in on.observers if each is not observer]


def owner_of(storage: Any, dtype: torch.dtype = torch.uint8) -> StorageRef | None:
    """Return the reference to a storage, also if C++ made it; None without a device's memory."""
    owner = _owners.get(storage.data_ptr())
    known = native.known(storage._cdata, dtype) if owner is None and native is not None else None
    if known is not None:
        memory, number, ledger, index = known
        # The memory of a machine that has ended is gone, and its tensors are not.
        owner = _reference(storage, native.devices.get(ledger) or device(index), memory, NativeRef)
        owner.number, owner.address = number, storage.data_ptr()
        _owners[owner.address] = owner
    return owner


def _give_up(address: int) -> None:
    """Let the twin of a storage, where it has one, be the only storage with its memory."""
    # A twin may have ended too, and not be released yet.
    other = _twins.get(address)
    if other is not None and other() is not None:
        _owners[address] = other
    else:
        del _owners[address]


_twins: dict[int, StorageRef] = {}
"""Address of the memory -> a storage with the same memory and without a block (:func:`twin`)."""


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor in the memory of ``tensor``, which keeps the values, not the block.

    So a graph has its values as long as it may be replayed, and the allocator sees memory as freed
    when the program has dropped it. A tensor of another device, layout or without values is
    returned detached.
    """
    index = tensor.get_device()
    # A negative index is the CPU's; sparse and quantized tensors have no single storage.
    plain = index >= 0 and tensor.layout is torch.strided
    owner = owner_of(tensor.untyped_storage()) if plain else None
    if owner is None or owner.on.index != index or isinstance(owner, MetaRef):
        return tensor.detach()
    known = _twins.get(owner.address)
    storage: Any = known() if known is not None else None
    if storage is None:
        storage = on_device(owner.tensor, index).untyped_storage()
        new = _twins[owner.address] = _reference(storage, owner.on, owner.tensor, AliasRef)
        new.address = owner.address
    # The twin is an inference tensor where the tensor is one.
    with torch.inference_mode(tensor.is_inference()):
        other = on_device(torch.empty(0, dtype=tensor.dtype, device="cpu"), index)
        other = set_storage(other, storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return with_bits(other, tensor)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor of a device that has no block of the device's memory.

    A tensor of another device or layout is cloned, and one without values detached: there is
    nothing to copy.
    """
    index = tensor.get_device()
    if index < 0 or tensor.layout is not torch.strided:
        return tensor.clone()
    if has_no_values(tensor.untyped_storage()):
        return tensor.detach()
    return with_bits(on_device(memory_of(tensor).clone(), index), tensor)


def blocks(on: Device) -> dict[memory_blocks.Block, int]:
    """Return the blocks of a device that are in use, with the address of the values of each."""
    on.release_ended()
    found = dict(on.held.values())
    for owner in [each for each in list(_owners.values()) if each.on is on]:
        if owner() is None:
            # The weak reference is dead, and its callback was lost.
            owner.release()  # an interrupt came into the first attempt
        elif owner.block is not None:
            found[owner.block] = owner.address
    return found


def shown(index: int, block: memory_blocks.Block, address: int) -> Block:
    """Return a block in use as observers see it."""
    return Block(index, address, block.size, block.requested, block.address)


meant = PerThread(index=0)
"""The device that C++ means where it names none: while it makes a sparse tensor, that of the
tensor.
"""


def index_meant(device: torch.device | None) -> int:
    """Return the index of the device that is given for a result, which C++ may leave out."""
    return meant.index if device is None or device.index is None else device.index


def meaning(index: int) -> AbstractContextManager[None]:
    """Let a device without an index be this one, for this thread."""
    return having(meant, index=index)


def _in_storage_of_argument(
    storage: Any, result: torch.Tensor, index: int, before: int
) -> torch.Tensor | None:
    """Return a tensor in the storage of an argument, whose memory the CPU kernel returned.

    Args:
        storage: The storage that was last known to begin at the memory; None if it has ended.
        result: The result of the CPU kernel.
        index: The index of the device.
        before: The bytes of the storage before the result.

    Returns:
        The tensor; None where the memory is another one by now.
    """
    view = on_device(result, index)
    if storage is None or before + view.untyped_storage().nbytes() > storage.nbytes():
        return None
    return set_storage(view, storage, result.storage_offset(), result.shape, result.stride())


def fresh(result: torch.Tensor, index: int) -> torch.Tensor:
    """Return a new tensor of device ``index`` in the memory of ``result``, an unshared CPU tensor.

    Raises:
        TypeError: The active profile does not support the dtype.
        RuntimeError: The active profile has no tensors with so many dimensions.
        torch.OutOfMemoryError: The tensor would exceed the active scope's memory limit.
    """
    # One function with many branches, because every result comes here: see `Pipeline.run`.
    context = thread_state.state.context
    checks = None if context is None else context.policy
    if checks is not None and checks.asks:
        checks.check_new(result)
    requested = result.nbytes
    if not requested or result.is_meta or result.is_conj():
        return _fresh_of_another_kind(result, index)
    address = data_ptr(result)
    offset: Any = result.storage_offset()
    before = offset * result.itemsize if offset else 0
    known = _owners.get(address - before)
    if known is not None:
        shared = _in_storage_of_argument(known(), result, index, before)
        if shared is not None:
            return shared
    # `device(index)` in short, without a call for the usual case.
    there = None if context is None else context.devices.machine
    on = None if there is None else there.memory.get(index)
    if on is None:
        on = device(index)
    block = None
    try:
        serves = checks is not None and checks.native
        if serves and (tensor := native.fresh(result, serves, on)) is not None:
            return tensor
        block = on.allocate(
            requested, 0 if context is None else context.thread.streams.get(index, 0)
        )
        if on.kept and (tensor := _in_kept_memory(result, on, block)) is not None:
            return tensor
        if serves and (tensor := native.fresh(result, serves, on, block)) is not None:
            return tensor
        tensor = on_device(result, index)
        owner = _reference(tensor.untyped_storage(), on, result)
        # As `_own` does it, without the time of its frame.
        owner.address, owner.block = address, block
        _owners[address] = owner
        if on.observers:
            owner.tell_allocated()
        return tensor
    # Also KeyboardInterrupt: without an owner the block would be lost.
    except BaseException:
        _free_unowned(on, block)
        raise


def _in_kept_memory(
    result: torch.Tensor, on: Device, block: memory_blocks.Block
) -> torch.Tensor | None:
    """Return a new tensor in the memory that was kept for its block; None where there is none."""
    moved = kept_memory.moved(result, on.kept, block.address, set_storage)
    if moved is None:
        return None
    tensor = on_device(moved, on.index)
    _own(_reference(tensor.untyped_storage(), on, moved, KnownRef), data_ptr(moved), block)
    return tensor


def _fresh_of_another_kind(result: torch.Tensor, index: int) -> torch.Tensor:
    """Do as :func:`fresh` does, for a tensor without memory of its own or with a conjugate bit."""
    # The conjugate bit cannot go through DLPack; the memory behind it can.
    if result.is_conj():
        return conj(fresh(conj(result), index))
    if result.nbytes:
        return _fresh_without_values(result, index)
    return _fresh_without_memory(result, index)


def _fresh_without_memory(result: torch.Tensor, index: int) -> torch.Tensor:
    """Do as :func:`fresh` for a tensor of no bytes: nothing is counted or found by address."""
    if result.is_meta:
        result = torch.empty_strided(
            result.shape, result.stride(), dtype=result.dtype, device="cpu"
        )
    return on_device(result, index)


def _fresh_without_values(meta: torch.Tensor, index: int) -> torch.Tensor:
    """Do as :func:`fresh` does, for a tensor of torch's meta device."""
    of = _by_meta.get(meta.untyped_storage()._cdata)
    storage = of() if of is not None else None
    if storage is not None:  # the result is a view of an argument
        view = on_device(torch.empty(0, dtype=meta.dtype, device="cpu"), index)
        return set_storage(view, storage, meta.storage_offset(), meta.shape, meta.stride())
    on = device(index)
    block = None
    try:
        block = on.allocate(meta.nbytes, stream(index))
        tensor = without_values(meta, block.address, index)
        owner = _reference(tensor.untyped_storage(), on, _NOTHING, MetaRef)
        owner.meta = meta
        _own(owner, block.address, block)
        _by_meta[meta.untyped_storage()._cdata] = owner
        return tensor
    except BaseException:
        _free_unowned(on, block)
        raise


def _free_unowned(on: Device, block: memory_blocks.Block | None) -> None:
    """Free a block for a storage of which an interrupt came before it had the block."""
    # By identity over all owners: the interrupt may have come before or after `_own`.
    owned = [each.block for each in list(_owners.values())] + [
        each for each, _ in list(on.held.values())
    ]
    if block is not None and all(each is not block for each in owned):
        on.freed.append(block)


_NOTHING = torch.empty(0, device="cpu")

_by_meta: dict[int, MetaRef] = {}
"""The storage on torch's meta device -> the storage on the device."""


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of torch's meta device for a simulated or CPU tensor."""
    tensor = without_disguise(tensor)
    owner = _owners.get(tensor.untyped_storage().data_ptr())
    if isinstance(owner, MetaRef) and owner.on.index == tensor.get_device():
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        storage = owner.meta.untyped_storage()
        meta = _set_meta(meta, storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return with_bits(meta, tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# By the meta kernel itself, below modes and autograd.
_set_meta = functools.partial(
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk, torch._C.DispatchKey.Meta
)


def stream(index: int) -> int:
    """Return the id of this thread's current stream on a device."""
    context = thread_state.state.context
    return context.thread.streams.get(index, 0) if context is not None else 0


def take_memory(storage: Any, index: int, memory: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Count a storage of device ``index`` in the memory of ``memory``, a CPU or meta tensor.

    Returns:
        The CPU tensor whose memory it had, None where it had none, and the address of its memory
        now.

    Raises:
        torch.OutOfMemoryError: The memory would exceed the active scope's memory limit. Nothing has
            changed then.
    """
    known = _owner_of_any(storage)
    serves = (
        native is not None
        and not memory.is_meta
        and (known is None or isinstance(known, NativeRef))
    )
    if serves and _adopted(storage, index, memory, known):
        return None, data_ptr(memory)
    device(index).release_ended()  # a storage that ended may have had this one's negative number
    owner = _owner_of_any(storage)
    on = device(index) if owner is None else owner.on
    # Allocated first: if memory runs out, nothing has changed.
    block = on.allocate(memory.nbytes, stream(index)) if memory.nbytes else None
    if owner is not None:
        _give_up(owner.address)
    if serves and native.adopt(storage, memory, on, block):
        return None, 0 if block is None else data_ptr(memory)
    old = None
    if owner is None:
        owner = _reference(storage, on, memory)
    else:
        owner, old = _without_memory(owner, storage, memory)
    return old, _put_in_memory(owner, storage, memory, block)


def _owner_of_any(storage: Any) -> StorageRef | None:
    """Return the reference to a storage, also to one that is resized to 0."""
    # Known by the negative address of their C++ object, as an empty storage has the address 0. The
    # machine of another one may have ended.
    return owner_of(storage) if storage.data_ptr() else _owners.get(-storage._cdata)


def _adopted(storage: Any, index: int, memory: torch.Tensor, known: StorageRef | None) -> bool:
    """Let the kernels in C++ count a storage as having ``memory``. Return whether they do."""
    if not native.adopt(storage, memory, device(index) if known is None else known.on):
        return False
    # Storages that had ended were released meanwhile, perhaps one whose memory had this address.
    if known is not None and _owners.get(known.address) is known:
        _give_up(known.address)
    return True


def _without_memory(
    owner: StorageRef, storage: Any, memory: torch.Tensor
) -> tuple[StorageRef, torch.Tensor | None]:
    """Free the block of a storage that gets the memory of ``memory``.

    Returns:
        The reference to the storage from now on, and the CPU tensor whose memory it had, None where
        it had none.
    """
    # Not where a twin has the memory: a graph that was captured with it goes on to use it.
    old = None if owner.address in _owners or isinstance(owner, MetaRef) else owner.tensor
    on = owner.on
    if isinstance(owner, NativeRef):
        native.adopt(storage, _NOTHING, on, None)
        native.disown(storage._cdata)
        owner = _reference(storage, on, memory)
    freed, owner.block = owner.block, None
    if freed is not None:
        on.freed.append(freed)
        for observer in on.observers:
            observer.freed(owner.address)
    if memory.nbytes >= LARGE and owner.watcher is None and not isinstance(owner, MetaRef):
        # The reference to a smaller storage. A watcher must be older than the owner.
        owner = _reference(storage, on, memory, type(owner))
    return owner, old


def _put_in_memory(
    owner: StorageRef, storage: Any, memory: torch.Tensor, block: memory_blocks.Block | None
) -> int:
    """Put a storage, which has a block, in the memory of ``memory``. Return the address."""
    address = 0
    if block is not None:
        address = block.address if memory.is_meta else data_ptr(memory)
    if isinstance(owner, MetaRef):
        _by_meta.pop(owner.meta.untyped_storage()._cdata, None)
        owner.meta, owner.forgotten, memory = memory, None, _NOTHING
        _by_meta[owner.meta.untyped_storage()._cdata] = owner
    owner.tensor, owner.view, owner.viewer = memory, memory, 0
    _own(owner, address or -storage._cdata, block)
    return address


def owner_at(tensor: torch.Tensor) -> StorageRef | None:
    """Return the reference to the storage of a tensor made in Python; None if it has no memory."""
    # Asked of the tensor first, because a storage takes Python a new object.
    return _owners.get(data_ptr(tensor)) or _made_here(tensor.untyped_storage())


def keep_address(tensor: torch.Tensor) -> None:
    """Note that the program has read the address of a strided tensor of the device.

    From now on, a tensor that gets the same block has the same address.
    """
    storage = tensor.untyped_storage()
    owner = _made_here(storage)
    if owner.__class__ is StorageRef:
        owner.__class__ = KnownRef
    elif native is not None and (owner is None or isinstance(owner, NativeRef)):
        native.keep(storage._cdata)


def _made_here(storage: Any) -> StorageRef | None:
    return _owners.get(storage.data_ptr() or -storage._cdata)


def has_no_values(storage: Any) -> bool:
    """Return whether a storage of the device is one without values."""
    owner = _made_here(storage)
    return isinstance(owner, MetaRef) and owner() is not None


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor of the device or of the CPU has values."""
    return tensor.get_device() < 0 or not has_no_values(tensor.untyped_storage())


def forget_values(storage: Any) -> None:
    """Let a storage of the device have no values from now on."""
    address = storage.data_ptr()
    owner = owner_of(storage)
    if owner is None or isinstance(owner, MetaRef):
        return
    new = _reference(storage, owner.on, _NOTHING, MetaRef)
    new.meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
    new.address, new.forgotten = address, owner.tensor
    if isinstance(owner, NativeRef):
        native.disown(storage._cdata)
    else:
        new.block, owner.block = owner.block, None
    _owners[address] = new
    _by_meta[new.meta.untyped_storage()._cdata] = new


set_storage = functools.partial(
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk, torch._C.DispatchKey.CPU
)
"""``Tensor.set_`` with a storage, by its CPU kernel, which accepts tensors of the device too."""


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor in a simulated tensor's memory, without conjugate and negative bits.

    The caller must not resize the result: it may be the tensor that owns the memory.
    """
    # `__class__` and `is`, since this is asked for every argument of every kernel.
    kind = tensor.__class__
    if kind is not _Tensor and kind is not _Parameter:
        tensor = without_disguise(tensor)
    address = data_ptr(tensor)
    dtype = tensor.dtype
    shape = tensor.shape
    stride = tensor.stride()
    owner = _owners.get(address)
    if owner is not None:
        own = owner.tensor
        # The cheapest comparison first. Views may share an address, so shape and strides count.
        alike = own.dtype is dtype and own.shape == shape and own.stride() == stride
        # Not in `_has_gaps`, which would be a frame of each call.
        if alike and (own.is_contiguous() or not _has_gaps(own)):
            return own
    else:
        owner = owner_of(tensor.untyped_storage(), dtype)
        if owner is None:  # a storage without memory
            _check_whole(tensor)
            return on_cpu(tensor)
    return _kept_view(owner, tensor, address, dtype, shape, stride)


def _kept_view(
    owner: StorageRef,
    tensor: torch.Tensor,
    address: int,
    dtype: torch.dtype,
    shape: torch.Size,
    stride: Any,
) -> torch.Tensor:
    """Return the last view of a block's CPU tensor if it is one for this tensor, else a new one."""
    view = owner.view
    alike = (
        data_ptr(view) == address
        and view.dtype is dtype
        and view.shape == shape
        and view.stride() == stride
    )
    # A view with gaps may only be given to the tensor that it was made for, see `_is_dense`.
    if alike and (owner.viewer == tensor._cdata or (not owner.viewer and view is not owner.tensor)):
        return view
    view = owner.view = _view(owner, tensor)
    owner.viewer = 0 if _is_dense(view) else tensor._cdata
    return view


def _has_gaps(own: torch.Tensor) -> bool:
    """Return whether a block's CPU tensor has gaps. If so, each tensor needs a view of its own."""
    return own.nbytes != own.untyped_storage().nbytes()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether torch's overlap checks compare this tensor with others by memory range.

    They compare a tensor with gaps between its elements by identity alone, so it needs a view of
    its own. The result may be False for a dense tensor, which then gets its own view too.
    """
    # Row-major, or the transpose of a matrix: the usual cases.
    return tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride() == (1, tensor.shape[0]))


def without_disguise(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a plain view of it where its class has its own shape, strides or dtype.

    torch's kernels read a tensor's own. The class's may raise, as those of an uninitialized
    parameter do, or differ.
    """
    kind = tensor.__class__
    if (
        kind.shape is _Tensor.shape
        and kind.stride is _Tensor.stride
        and kind.dtype is _Tensor.dtype
    ):
        return tensor
    return tensor.as_subclass(_Tensor)


def resizable_memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new CPU tensor in a simulated tensor's memory, for a kernel that may resize it.

    The memory cannot grow: a kernel that needs more than the block holds raises an error with the
    text :data:`CANNOT_GROW`.
    """
    tensor = without_disguise(tensor)
    owner = owner_of(tensor.untyped_storage(), tensor.dtype)
    if owner is None:
        _check_whole(tensor)
        # A tensor without memory gets memory of its own, which the caller gives to the storage.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    # torch never resizes imported memory.
    if owner.tensor.untyped_storage().resizable():
        _import_again(owner)
    return _view(owner, tensor)


CANNOT_GROW = "Trying to resize storage that is not resizable"
"""The beginning of torch's error for a resize of memory that cannot be resized."""


def _import_again(owner: StorageRef) -> None:
    """Import a block's CPU tensor by DLPack: its new storage starts at it and has a fixed size."""
    with torch.inference_mode(owner.tensor.is_inference()):
        owner.tensor = owner.view = on_cpu(owner.tensor)
    owner.viewer = 0


def _view(owner: StorageRef, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a block's CPU tensor, laid out and typed as a simulated tensor."""
    if isinstance(owner, MetaRef):
        raise NoValueError("a kernel of the CPU")
    # The kernel's result was part of a larger storage, and the block begins there.
    if owner.tensor.storage_offset():
        _import_again(owner)
    own = owner.tensor
    # Torch refuses writes to views of an inference tensor.
    if own.is_inference() and not tensor.is_inference():
        return on_cpu(tensor)
    _check_whole(tensor)
    if own.dtype is tensor.dtype:
        return _as_strided(own, tensor.shape, tensor.stride(), tensor.storage_offset())
    # Another dtype, as of `view(dtype)`: the same bytes under another type.
    view = torch.empty(0, dtype=tensor.dtype)
    return set_storage(
        view, own.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def shape_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor shaped like a tensor, for a kernel that reads no memory."""
    if _is_whole(tensor):
        return memory_of(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


shrunk: dict[int, Site] = {}
"""The ``_cdata`` of a storage that was resized -> the line of the program that made it smaller."""


def _check_whole(tensor: torch.Tensor) -> None:
    """Refuse a tensor that does not lie within its storage, before a kernel is given its memory.

    Raises:
        torch.AcceleratorError: CUDA's error of such a kernel. The device is lost.
        RuntimeError: The error of MPS.
    """
    if _is_whole(tensor):
        return
    storage = tensor.untyped_storage()
    if policy.stands_for_mps():
        raise RuntimeError("Placeholder storage has not been allocated on MPS device!")
    site = shrunk.get(storage._cdata)
    where = "" if site is None else f", which was resized at {site}"
    held = f"{storage.nbytes()}{where}"
    why = (
        f"A kernel used a tensor that needs {_end(tensor)} bytes of a storage of {held}. Use it "
        "with its size restored."
    )
    raise policy.lose(why, ILLEGAL_ADDRESS) if policy.stands_for_cuda() else RuntimeError(why)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies within its storage."""
    return _end(tensor) <= tensor.untyped_storage().nbytes()


def _end(tensor: torch.Tensor) -> Any:
    """Return the bytes of a storage in which a tensor just fits."""
    return (tensor.storage_offset() + extent(tensor)) * tensor.itemsize if tensor.numel() else 0
