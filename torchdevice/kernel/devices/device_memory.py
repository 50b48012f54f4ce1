"""The memory part of a runtime: figures, statistics, blocks and segments."""

from __future__ import annotations

import abc
import importlib
import itertools
from typing import Any, NamedTuple

from torchdevice.kernel.python import forks


def _machine() -> Any:
    """Return the machine's memory. Importing psutil takes longer than any module here."""
    return importlib.import_module("psutil").virtual_memory()


# A child could not end an import that another thread had begun.
forks.at_fork(before=_machine)


class Block(NamedTuple):
    """A block of memory in use.

    Attributes:
        device: The index of the device.
        address: The address of the memory.
        size: The size of the block in bytes.
        requested: The bytes that were requested of it.
        place: The address that the device's allocator gives the block, where that is a model;
            otherwise None.
    """

    device: int
    address: int
    size: int
    requested: int
    place: int | None = None


class Part(NamedTuple):
    """A block of a segment.

    Attributes:
        address: The address of the block.
        size: The size in bytes.
        requested_size: The bytes that were requested of it.
        state: The state in the words of ``torch.cuda.memory_snapshot``.
        data_ptr: The address of its values; 0 for a block that is not in use.
    """

    address: int
    size: int
    requested_size: int
    state: str
    data_ptr: int


class Segment(NamedTuple):
    """A range of memory that an allocator has from the driver.

    Attributes:
        device: The index of the device.
        stream: The id of the stream that it belongs to.
        is_large: Whether it belongs to a pool of large blocks.
        is_expandable: Whether it can grow.
        segment_pool_id: The id of the private pool that it belongs to; (0, 0) for none.
        parts: Its blocks, without gaps.
    """

    device: int
    stream: int
    is_large: bool
    is_expandable: bool
    segment_pool_id: tuple[int, int]
    parts: tuple[Part, ...]


# ---- private pools, as `torch.cuda.MemPool` and graphs use them ----------------------------------

PoolId = tuple[int, int]
"""The id of a private pool: (0, n) for one of the program's own, (n, 0) for one that a graph made.
"""

_pool_ids = itertools.count(1)


def new_id(*, for_graph: bool = False) -> PoolId:
    """Return an id that no pool of this process has."""
    number = next(_pool_ids)
    return (number, 0) if for_graph else (0, number)


PrivatePools = Any
"""The private pools of one device, which ``simulation/allocator/caching_allocator.py`` has:
``keep_private``, ``release_private``, ``uses_of``, ``empty_private``, ``route`` and ``unroute``.
"""


class Memory(NamedTuple):
    """Memory figures of one device, in bytes."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Stat(NamedTuple):
    """A statistic of an allocator: current value, peak, and sums of allocated and freed."""

    current: int
    peak: int
    allocated: int
    freed: int


class DeviceMemory(abc.ABC):
    """The memory of a type of device. The base class has no figures of an allocator.

    Attributes:
        device_type: The device type, as torch itself reports it in ``torch.device.type``.
        exact_memory: Whether the memory figures are those of the device's own allocator.
        has_peaks: Whether the device's own figures include peaks; else see :meth:`note_memory`.
    """

    device_type: str
    exact_memory = True
    has_peaks = True

    def total_memory(self, index: int) -> int:
        """Return the size of the device's memory."""
        return int(_machine().total)

    def free_memory(self, index: int) -> int:
        """Return how much of the device's memory is free."""
        return int(_machine().available)

    @abc.abstractmethod
    def memory(self, index: int) -> Memory:
        """Return the memory figures of this process on the device."""

    def note_memory(self) -> None:
        """Look at the figures for the sake of the peaks, after a call that allocates much."""

    @abc.abstractmethod
    def reset_peak_memory(self, index: int) -> None:
        """Reset the peaks to the current figures."""

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        """Limit allocations to a fraction (0 to 1) of the device's memory; None lifts the limit.

        Returns:
            Whether the device enforces the limit.
        """
        return False

    def empty_cache(self) -> None:
        """Release cached memory that is not in use."""

    def out_of_memory(self, error: BaseException) -> str | None:
        """Return the out-of-memory text for ``error`` if it reports that; else None."""
        return None
