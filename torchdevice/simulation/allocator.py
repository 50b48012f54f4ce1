"""The allocator of simulated devices: memory statistics, and the CPU tensor behind each tensor of a device.

Every result of an operator is counted here before the program gets it, and subtracted when its storage is freed. So the
figures are exactly the memory that the program holds; they exclude what a kernel needs while it runs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchdevice.devices.allocation_events import Block, Observer
from torchdevice.devices.runtime import Memory, Stat
from torchdevice.simulation import enforcement
from torchdevice.simulation.relabel import on_cpu, on_device

_conj = torch._C._VariableFunctions._conj


_neg_view = torch._C._VariableFunctions._neg_view


_as_strided = torch._C._VariableFunctions.as_strided


_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


_BLOCK = 512
"""``kMinBlockSize`` of CUDA's caching allocator: sizes are rounded up to a multiple of it, in bytes."""


_SEGMENT = 2 << 20
"""``kSmallBuffer``: the smallest segment that CUDA's caching allocator requests from the driver, in bytes."""


_LARGE = 1 << 20
"""``kSmallSize``: blocks of more bytes come from the large pool."""


_FIGURES = ("allocated", "requested", "count", "reserved")


def rounded(size: int) -> int:
    """Return the size of the block that CUDA's allocator returns for a request of ``size`` bytes."""
    return (size + _BLOCK - 1) & -_BLOCK


class _Pool:
    """Statistics of one memory pool: bytes allocated, bytes requested, number of blocks, bytes reserved.

    Each has a current value, a peak (``peak_...``) and the sum of all increases (``total_...``).
    """

    allocated: int
    peak_allocated: int
    total_allocated: int
    requested: int
    peak_requested: int
    total_requested: int
    count: int
    peak_count: int
    total_count: int
    reserved: int
    peak_reserved: int
    total_reserved: int

    def __init__(self) -> None:
        for name in _FIGURES:
            for each in (name, f"peak_{name}", f"total_{name}"):
                setattr(self, each, 0)
        self.forget_totals()

    def note(self, size: int, requested: int) -> None:
        """Add a block to the sums of all increases."""
        self.total_allocated += size
        self.total_requested += requested
        self.total_count += 1

    def add(self, size: int, requested: int) -> None:
        """Add a block to the current values, and raise the peaks."""
        self.count += 1
        self.requested += requested
        self.allocated = allocated = self.allocated + size
        if allocated > self.peak_allocated:
            self.peak_allocated = allocated
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        if self.count > self.peak_count:
            self.peak_count = self.count

    def remove(self, size: int, requested: int) -> None:
        self.allocated -= size
        self.requested -= requested
        self.count -= 1

    def reserve(self, change: int) -> None:
        self.reserved += change
        self.total_reserved += max(0, change)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def forget_peaks(self) -> None:
        for name in _FIGURES:
            setattr(self, f"peak_{name}", getattr(self, name))

    def forget_totals(self) -> None:
        self._forgotten = {name: self._totals(name) for name in _FIGURES}

    def _totals(self, name: str) -> tuple[int, int]:
        total: int = getattr(self, f"total_{name}")
        return total, total - getattr(self, name)

    def stat(self, name: str, unit: int = 1) -> Stat:
        allocated, freed = (now - then for now, then in zip(self._totals(name), self._forgotten[name], strict=True))
        return Stat(
            getattr(self, name) // unit, getattr(self, f"peak_{name}") // unit, allocated // unit, freed // unit
        )


class _Both(_Pool):
    """Statistics of the small and the large pool together. A sum of increases is the sum over both pools."""

    def __init__(self, *pools: _Pool) -> None:
        self._pools = pools
        super().__init__()

    def _totals(self, name: str) -> tuple[int, int]:
        small, large = (pool._totals(name) for pool in self._pools)
        return small[0] + large[0], small[1] + large[1]


class Device:
    """The memory statistics of one simulated device.

    Storages may be freed, by the garbage collector, between any two lines of this class. A freed storage therefore only
    appends its size to ``freed``; the next allocation or query subtracts the sizes.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.freed: list[int] = []
        self._small, self._large = _Pool(), _Pool()
        self._all = _Both(self._small, self._large)
        self._failures = 0
        self.renew_lock()

    def renew_lock(self) -> None:
        """Make a new lock in a forked child, where nobody releases a lock that another thread held at the fork."""
        self._lock = threading.RLock()

    def allocate(self, requested: int) -> None:
        """Count a new block for a request of ``requested`` bytes.

        Raises:
            torch.OutOfMemoryError: The block would exceed the active scope's memory limit. The text is CUDA's.
        """
        size = rounded(requested)
        pool = self._large if size > _LARGE else self._small
        with self._lock:
            if not self._reuses(requested):
                self._settle()
                if enforcement.watching:
                    self._check(size)
                self._grow(pool, size, requested)
            pool.note(size, requested)

    def _grow(self, pool: _Pool, size: int, requested: int) -> None:
        self._all.add(size, requested)
        pool.add(size, requested)
        if pool.allocated > pool.reserved:
            more = -(-(pool.allocated - pool.reserved) // _SEGMENT) * _SEGMENT
            pool.reserve(more)
            self._all.reserve(more)

    def _reuses(self, requested: int) -> bool:
        """Return whether the block freed last had this size. It is then reused, and no current value changes."""
        if not self.freed:
            return False
        last = self.freed.pop()
        if last != requested:
            self.freed.append(last)
        return last == requested

    def _check(self, size: int) -> None:
        try:
            enforcement.check_memory(self.index, size, self._all.allocated, self._all.reserved)
        except torch.OutOfMemoryError:
            self._failures += 1
            raise

    def _settle(self) -> None:
        """Subtract the freed blocks from the current values."""
        freed = self.freed
        while freed:
            requested = freed.pop()
            size = rounded(requested)
            self._all.remove(size, requested)
            (self._large if size > _LARGE else self._small).remove(size, requested)

    def figures(self) -> Memory:
        """Return the current values and the peaks, in bytes."""
        with self._lock:
            self._settle()
            whole = self._all
            return Memory(whole.allocated, whole.reserved, whole.peak_allocated, whole.peak_reserved)

    def statistics(self) -> dict[str, Any]:
        """Return all statistics, under the keys of ``torch.cuda.memory_stats``."""
        with self._lock:
            self._settle()
            pools = {"all": self._all, "small_pool": self._small, "large_pool": self._large}
            named = {
                "allocated_bytes": ("allocated", 1),
                "active_bytes": ("allocated", 1),
                "requested_bytes": ("requested", 1),
                "reserved_bytes": ("reserved", 1),
                "allocation": ("count", 1),
                "active": ("count", 1),
                "segment": ("reserved", _SEGMENT),
            }
            segments = self._all.stat("reserved", _SEGMENT)
            return {
                **{
                    key: {pool: figures.stat(name, unit) for pool, figures in pools.items()}
                    for key, (name, unit) in named.items()
                },
                "num_ooms": self._failures,
                "num_device_alloc": segments.allocated,
                "num_device_free": segments.freed,
            }

    def reset_peak(self) -> None:
        """Reset the peaks to the current values."""
        self._for_each_pool(_Pool.forget_peaks)

    def reset_accumulated(self) -> None:
        """Reset the sums of allocated and freed memory, and the number of out-of-memory errors, to 0."""
        self._for_each_pool(_Pool.forget_totals)
        self._failures = 0

    def empty_cache(self) -> None:
        """Release the segments that are reserved and not allocated."""
        with self._lock:
            self._settle()
            for pool in (self._small, self._large):
                unused = -(-pool.allocated // _SEGMENT) * _SEGMENT - pool.reserved
                pool.reserve(unused)
                self._all.reserve(unused)

    def _for_each_pool(self, change: Callable[[_Pool], None]) -> None:
        with self._lock:
            self._settle()
            for pool in (self._all, self._small, self._large):
                change(pool)


_devices: dict[int, Device] = {}


def device(index: int) -> Device:
    """Return the statistics of the device with this index."""
    found = _devices.get(index)
    return found if found is not None else _devices.setdefault(index, Device(index))


def _renew_locks() -> None:
    for each in list(_devices.values()):
        each.renew_lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_locks)


class _Owner(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage of the device, with the CPU tensor whose memory the storage has.

    Every CPU tensor that a kernel gets for a tensor of this storage is ``tensor`` or a view of it. So torch's kernels
    see which of their arguments overlap, and refuse or copy as they do on the CPU.

    Attributes:
        address: The address of the memory; for a storage that was resized to 0 a negative number of its own.
        freed: ``Device.freed`` of the storage's device.
        index: The index of the storage's device.
        requested: The size of the memory in bytes.
        tensor: The CPU tensor.
        view: The last view of ``tensor`` that a kernel got.
        viewer: The ``_cdata`` of the only tensor of the device that may get ``view`` again; 0 where every tensor with
            the view's address, dtype, shape and strides may.
    """

    __slots__ = ("address", "freed", "index", "requested", "tensor", "view", "viewer")
    address: int
    freed: list[int]
    index: int
    requested: int
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
    if not owner.requested:
        return
    owner.freed.append(owner.requested)
    for observer in observers:
        observer.freed(owner.address)


def blocks(index: int) -> list[Block]:
    """Return the blocks of a device that are in use."""
    owners = [owner for owner in list(_owners.values()) if owner.index == index and owner.requested]
    return [_block(owner) for owner in owners]


def _block(owner: _Owner) -> Block:
    return Block(owner.index, owner.address, rounded(owner.requested), owner.requested)


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
    on.allocate(requested)
    tensor = on_device(result, index)
    _own(_Owner(tensor.untyped_storage(), _ended), on, result, address)
    return tensor


def _own(owner: _Owner, on: Device, memory: torch.Tensor, address: int) -> None:
    """Note that a storage of a device has the memory of a CPU tensor, which begins at ``address``."""
    owner.address = address
    owner.index = on.index
    owner.requested = memory.nbytes
    owner.freed = on.freed
    owner.tensor = owner.view = memory
    owner.viewer = 0
    _owners[address] = owner
    if observers and owner.requested:
        block = _block(owner)
        for observer in observers:
            observer.allocated(block)


def take_memory(storage: Any, index: int, memory: torch.Tensor) -> torch.Tensor | None:
    """Count a storage of device ``index`` as having the memory of ``memory``, a CPU tensor, from now on.

    Returns:
        The CPU tensor whose memory it had; None where it had none.

    Raises:
        torch.OutOfMemoryError: The memory would exceed the active scope's memory limit. Nothing has changed then.
    """
    on = device(index)
    if memory.nbytes:
        on.allocate(memory.nbytes)
    emptied = -storage._cdata
    owner = _owners.pop(storage.data_ptr() or emptied, None)
    if owner is None:
        owner, old = _Owner(storage, _ended), None
    else:
        old = owner.tensor
        _freed(owner)
    _own(owner, on, memory, memory.data_ptr() if memory.nbytes else emptied)
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
