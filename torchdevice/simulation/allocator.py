"""The device's memory: what is allocated, who owns it, how much there is.

Every result of an operator is registered here before the program sees it. Its storage's end is noticed, so the figures
are exact: they count what the program holds, not what a kernel needed on its way.
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

from torchdevice.devices.allocations import Block, Observer
from torchdevice.devices.runtime import Memory, Stat
from torchdevice.simulation import policy
from torchdevice.simulation.relabel import on_cpu, on_device

_conj = torch._C._VariableFunctions._conj


_neg_view = torch._C._VariableFunctions._neg_view


_as_strided = torch._C._VariableFunctions.as_strided


_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})


_BLOCK = 512
"""``kMinBlockSize`` of CUDA's caching allocator: sizes are rounded up to it."""


_SEGMENT = 2 << 20
"""``kSmallBuffer``: what CUDA's caching allocator asks the driver for at least."""


_LARGE = 1 << 20
"""``kSmallSize``: larger blocks come from the large pool."""


_FIGURES = ("allocated", "requested", "count", "reserved")


def rounded(size: int) -> int:
    """Return the size of the block that CUDA's allocator gives for a size."""
    return (size + _BLOCK - 1) & -_BLOCK


class _Pool:
    """Blocks of one pool: their bytes, the bytes that were asked for, and their number; now, at most, and ever."""

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
        """Add a block to what was ever allocated."""
        self.total_allocated += size
        self.total_requested += requested
        self.total_count += 1

    def add(self, size: int, requested: int) -> None:
        """Add a block to what is allocated now."""
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
    """The two pools together: what was ever allocated is the sum of theirs."""

    def __init__(self, *pools: _Pool) -> None:
        self._pools = pools
        super().__init__()

    def _totals(self, name: str) -> tuple[int, int]:
        small, large = (pool._totals(name) for pool in self._pools)
        return small[0] + large[0], small[1] + large[1]


class Device:
    """The figures of one simulated device. A storage's end only leaves a note, which the next reader adds up."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.freed: list[int] = []
        self._small, self._large = _Pool(), _Pool()
        self._all = _Both(self._small, self._large)
        self._failures = 0
        self.renew_lock()

    def renew_lock(self) -> None:
        """Take a lock that nobody holds: what another thread held when the process forked, nobody gives back."""
        self._lock = threading.RLock()

    def allocate(self, requested: int) -> None:
        """Count a new block.

        Raises:
            torch.OutOfMemoryError: The active scope limits the memory, and it does not suffice; worded as CUDA's.
        """
        size = rounded(requested)
        pool = self._large if size > _LARGE else self._small
        with self._lock:
            if not self._reuses(requested):
                self._settle()
                if policy.watching:
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
        """Take the place of the block that ended last, if it had the same size: then no figure of now changes."""
        if not self.freed:
            return False
        last = self.freed.pop()
        if last != requested:
            self.freed.append(last)
        return last == requested

    def _check(self, size: int) -> None:
        try:
            policy.check_memory(self._index, size, self._all.allocated, self._all.reserved)
        except torch.OutOfMemoryError:
            self._failures += 1
            raise

    def _settle(self) -> None:
        freed = self.freed
        while freed:
            requested = freed.pop()
            size = rounded(requested)
            self._all.remove(size, requested)
            (self._large if size > _LARGE else self._small).remove(size, requested)

    def figures(self) -> Memory:
        """Return the present figures."""
        with self._lock:
            self._settle()
            whole = self._all
            return Memory(whole.allocated, whole.reserved, whole.peak_allocated, whole.peak_reserved)

    def statistics(self) -> dict[str, Any]:
        """Return all figures, under the keys of ``torch.cuda.memory_stats``."""
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
        """Let the peaks start at the present figures."""
        self._for_each_pool(_Pool.forget_peaks)

    def reset_accumulated(self) -> None:
        """Let the sums of what was allocated and freed start at 0."""
        self._for_each_pool(_Pool.forget_totals)
        self._failures = 0

    def empty_cache(self) -> None:
        """Give back what is reserved and not allocated."""
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
    """Return the device of an index."""
    found = _devices.get(index)
    return found if found is not None else _devices.setdefault(index, Device(index))


def _renew_locks() -> None:
    for each in list(_devices.values()):
        each.renew_lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_renew_locks)


class _Owner(weakref.ref):  # type: ignore[type-arg]
    """A storage of the device: noticed when it ends, and the CPU tensor whose memory it is until then.

    Every CPU tensor that a kernel gets for a tensor of this storage is ``tensor`` or a view of it. So torch's kernels
    see which of their arguments overlap, and refuse or copy as they do on the CPU.

    Attributes:
        view: The last such view.
        viewer: The identity of the tensor it was made for, or 0 where it serves any tensor that looks the same.
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
"""Who is told of every new block and of its end, in the thread where it happens."""


def forget(observer: Observer) -> None:
    """Tell an observer nothing more."""
    observers[:] = [each for each in observers if each is not observer]


def _ended(owner: _Owner) -> None:
    if _owners.get(owner.address) is owner:
        del _owners[owner.address]
    owner.freed.append(owner.requested)
    for observer in observers:
        observer.freed(owner.address)


def blocks(index: int) -> list[Block]:
    """Return the memory of a device that is in use."""
    owners = [owner for owner in list(_owners.values()) if owner.index == index]
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
    """Return a CPU tensor that nobody else has as a new tensor of the device.

    Raises:
        TypeError: The active profile does not hold the dtype.
        torch.OutOfMemoryError: The active scope's memory limit does not allow it.
    """
    if policy.watching:
        policy.check_dtype(result.dtype)
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
            return set_storage(view, storage, 0, result.shape, result.stride())  # as the CPU's kernel does it
    on = _devices.get(index) or device(index)
    on.allocate(requested)
    tensor = on_device(result, index)
    owner = _Owner(tensor.untyped_storage(), _ended)
    owner.address = address
    owner.index = index
    owner.requested = requested
    owner.freed = on.freed
    owner.tensor = owner.view = result
    owner.viewer = 0
    _owners[address] = owner
    for observer in observers:
        observer.allocated(_block(owner))
    return tensor


set_storage = functools.partial(torch.ops.aten.set_.source_Storage_storage_offset._op_dk, torch._C.DispatchKey.CPU)
"""``Tensor.set_`` for tensors of the device too."""


def with_bits(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of memory with the conjugate and negative bits of another tensor."""
    if like.is_conj():
        memory = _conj(memory)
    return _neg_view(memory) if like.is_neg() else memory


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor with the memory of a simulated one, without its conjugate and negative bits.

    It must not be resized: it may be the one that the device's memory belongs to.
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
    """Return whether torch sees by the memory alone that this tensor and its like overlap.

    Of others it sees only whether they are the same tensor. False may be said of some that are dense.
    """
    return tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride() == (1, tensor.shape[0]))


def resizable_memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same as a tensor of its own, for a kernel that may resize it.

    The memory cannot grow: a kernel that asks for more than the block holds raises :data:`CANNOT_GROW`.
    """
    owner = _owners.get(tensor.untyped_storage().data_ptr())
    if owner is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    _fix(owner)
    return _view(owner, tensor)


CANNOT_GROW = "Trying to resize storage that is not resizable"
"""The beginning of torch's error for it."""


def _fix(owner: _Owner) -> None:
    """Let nobody resize the memory of a block: torch never resizes memory that came by DLPack."""
    if owner.tensor.untyped_storage().resizable():
        _import_again(owner)


def _import_again(owner: _Owner) -> None:
    """Give a block's CPU tensor a storage that begins where the tensor does and cannot be resized."""
    with torch.inference_mode(owner.tensor.is_inference()):
        owner.tensor = owner.view = on_cpu(owner.tensor)
    owner.viewer = 0


def _view(owner: _Owner, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a block's CPU tensor that looks at the memory as a tensor of the device does."""
    if owner.tensor.storage_offset():  # a kernel handed out a part of its memory, where the block begins
        _import_again(owner)
    own = owner.tensor
    if own.is_inference() and not tensor.is_inference():  # torch would refuse to write to a view
        return on_cpu(tensor)
    if own.dtype is tensor.dtype:
        return _as_strided(own, tensor.shape, tensor.stride(), tensor.storage_offset())
    view = torch.empty(0, dtype=tensor.dtype)
    return set_storage(view, own.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
