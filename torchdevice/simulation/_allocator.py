"""The device's memory: what is allocated, who owns it, how much there is.

Every result of an operator is registered here before the program sees it. Its storage's end is noticed, so the figures
are exact: they count what the program holds, not what a kernel needed on its way.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import torch

from torchdevice.simulation import _policy
from torchdevice.simulation._relabel import on_cpu, on_device

_conj = torch._C._VariableFunctions._conj
_neg_view = torch._C._VariableFunctions._neg_view

_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})

_BLOCK = 512
"""``kMinBlockSize`` of CUDA's caching allocator: sizes are rounded up to it."""

_SEGMENT = 2 << 20
"""``kSmallBuffer``: what CUDA's caching allocator asks the driver for at least."""


class Figures(NamedTuple):
    """Memory of one device in bytes, now and at the most since the process began or the peaks were reset."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Device:
    """The figures of one simulated device. A storage's end only leaves a note, which the next reader adds up."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.freed: list[int] = []
        self._lock = threading.RLock()
        self._allocated = self._reserved = self._peak_allocated = self._peak_reserved = 0

    def allocate(self, size: int) -> None:
        """Count a new block of ``size`` bytes, a multiple of CUDA's blocks.

        Raises:
            torch.OutOfMemoryError: The active scope limits the memory, and it does not suffice; worded as CUDA's.
        """
        with self._lock:
            if self.freed:
                self._settle()
            if _policy.watching:
                _policy.check_memory(self._index, size, self._allocated, self._reserved)
            self._allocated += size
            if self._allocated > self._peak_allocated:
                self._peak_allocated = self._allocated
            if self._allocated > self._reserved:
                self._reserved = -(-self._allocated // _SEGMENT) * _SEGMENT
                self._peak_reserved = max(self._peak_reserved, self._reserved)

    def _settle(self) -> None:
        freed = self.freed
        while freed:
            self._allocated -= freed.pop()

    def figures(self) -> Figures:
        """Return the present figures."""
        with self._lock:
            self._settle()
            return Figures(self._allocated, self._reserved, self._peak_allocated, self._peak_reserved)

    def reset_peak(self) -> None:
        """Let the peaks start at the present figures."""
        with self._lock:
            self._settle()
            self._peak_allocated, self._peak_reserved = self._allocated, self._reserved

    def empty_cache(self) -> None:
        """Give back what is reserved and not allocated."""
        with self._lock:
            self._settle()
            self._reserved = -(-self._allocated // _SEGMENT) * _SEGMENT


_devices: dict[int, Device] = {}


def device(index: int) -> Device:
    """Return the device of an index."""
    found = _devices.get(index)
    return found if found is not None else _devices.setdefault(index, Device(index))


class _Owner(weakref.ref):  # type: ignore[type-arg]
    """A storage of the device: noticed when it ends, and the CPU tensor whose memory it is until then."""

    __slots__ = ("address", "freed", "size", "tensor")
    address: int
    freed: list[int]
    size: int
    tensor: torch.Tensor


_owners: dict[int, _Owner] = {}


def _ended(owner: _Owner) -> None:
    if _owners.get(owner.address) is owner:
        del _owners[owner.address]
    owner.freed.append(owner.size)


def fresh(result: torch.Tensor, index: int) -> torch.Tensor:
    """Return a CPU tensor that nobody else has as a new tensor of the device.

    Raises:
        TypeError: The active profile does not hold the dtype.
        torch.OutOfMemoryError: The active scope's memory limit does not allow it.
    """
    if _policy.watching:
        _policy.check_dtype(result.dtype)
    if result.dtype in _COMPLEX and result.is_conj():
        return _conj(fresh(_conj(result), index))
    size = result.nbytes
    if not size:
        return on_device(result, index)
    size = (size + _BLOCK - 1) & -_BLOCK
    on = _devices.get(index) or device(index)
    on.allocate(size)
    tensor = on_device(result, index)
    owner = _Owner(tensor.untyped_storage(), _ended)
    owner.address = address = result.data_ptr()
    owner.size = size
    owner.freed = on.freed
    owner.tensor = result
    _owners[address] = owner
    return tensor


def with_bits(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of memory with the conjugate and negative bits of another tensor."""
    if like.is_conj():
        memory = _conj(memory)
    return _neg_view(memory) if like.is_neg() else memory


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor with the memory of a simulated one, without its conjugate and negative bits.

    It must not be resized: it may be the one that the device's memory belongs to.
    """
    owner = _owners.get(tensor.data_ptr())
    if owner is not None:
        own = owner.tensor
        if own.dtype is tensor.dtype and own.shape == tensor.shape and own.stride() == tensor.stride():
            return own
    return on_cpu(tensor)
