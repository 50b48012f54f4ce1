"""What a runtime says of a device's memory: figures, statistics, blocks, and the settings of its allocator."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torchdevice.devices.allocation_events import (
    Block,
    Observer,
    OperatorWatcher,
    Part,
    PrivatePools,
    Segment,
    held_by_python,
)

_LARGE = 1 << 20
"""``kSmallSize`` of CUDA's caching allocator, in bytes: larger blocks belong to the large pool."""


class Memory(NamedTuple):
    """Memory figures of one device, in bytes."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Stat(NamedTuple):
    """One statistic of an allocator: its current value, its peak, and the sums of what was allocated and freed."""

    current: int
    peak: int
    allocated: int
    freed: int


class DeviceMemory(abc.ABC):
    """The memory of a type of device. The base class describes a device whose allocator says nothing.

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
        import psutil  # here, since its import takes longer than that of any module here

        return psutil.virtual_memory().total

    def free_memory(self, index: int) -> int:
        """Return how much of the device's memory is free."""
        import psutil

        return psutil.virtual_memory().available

    @abc.abstractmethod
    def memory(self, index: int) -> Memory:
        """Return the memory figures of this process on the device."""

    def note_memory(self) -> None:
        """Look at the figures for the sake of the peaks, after a call that allocates much."""

    @abc.abstractmethod
    def reset_peak_memory(self, index: int) -> None:
        """Reset the peaks to the current figures."""

    def statistics(self, index: int) -> Mapping[str, Any]:
        """Return further figures of the device's allocator, under the keys of ``torch.cuda.memory_stats``.

        A value is a number, a :class:`Stat`, or one for each of ``"all"``, ``"small_pool"`` and ``"large_pool"``.
        """
        return {}

    def reset_accumulated_memory(self, index: int) -> None:
        """Reset to 0 the sums in :meth:`statistics` of what was allocated and freed."""

    def blocks(self, index: int) -> list[Block]:
        """Return the blocks of the device's tensors that are alive."""
        return held_by_python(self.device_type, index)

    def segments(self, index: int) -> list[Segment]:
        """Return the segments of the device's allocator. The base class makes one of each block."""
        blocks = sorted(self.blocks(index))
        parts = [Part(each.address, each.size, each.requested, "active_allocated", each.address) for each in blocks]
        pairs = zip(blocks, parts, strict=True)
        return [Segment(block.device, 0, block.size > _LARGE, False, (0, 0), (part,)) for block, part in pairs]

    def watch_allocations(self, observer: Observer, context: Any) -> Callable[[], None]:
        """Call an observer for each allocation of a context from now on.

        The base class watches the operators of this thread.

        Returns:
            A function that ends this. It may be called again.
        """
        return OperatorWatcher(self.device_type, observer).stop

    def watch_host_waits(self, context: Any) -> None:
        """Call the stream observers of a context for each operator at which the host waits, such as ``item()``.

        The base class does nothing. May be called again for a context.
        """

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        """Limit allocations to a fraction of the device's memory, from 0 to 1; None lifts the limit.

        Returns:
            Whether the device enforces the limit.
        """
        return False

    def empty_cache(self) -> None:
        """Release cached memory that is not in use."""

    def private_pools(self, index: int) -> PrivatePools | None:
        """Return the private pools of a device's allocator; None where it has none."""
        return None

    def same_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another tensor with the memory of ``tensor``, which does not keep that memory from being freed.

        Where the device's allocator cannot tell the two, the other tensor keeps it.
        """
        return tensor.detach()

    def copy_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` that is no memory of the device, where the device has an allocator."""
        return tensor.clone()

    def set_allocator(self, text: str) -> bool:
        """Change the settings of the device's allocator. Return whether it has CUDA's settings.

        Raises:
            ValueError: A setting is wrong. The text is torch's.
        """
        return False

    def allocator_settings(self) -> Mapping[str, Any]:
        """Return the settings of the device's allocator, under the keys of ``torch.cuda.memory._snapshot``."""
        return {}

    def out_of_memory(self, error: BaseException) -> str | None:
        """Return the text for an out-of-memory message if ``error`` says that memory ran out, else None."""
        return None
