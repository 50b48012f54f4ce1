"""The memory of a CPU that stands in for an accelerator: the memory of this process.

Figures are those of the process heap since the first use: what malloc has handed out (psutil reads
the C library's own statistics). The peak is the largest figure seen when asked, or the growth of
the resident set's high-water mark where the system reports one. Both include the program's
allocations outside torch.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil

from torchdevice.kernel.devices.device_memory import Memory


class ProcessMemory:
    """The memory figures of this process since the object was made."""

    def __init__(self) -> None:
        self._heap_base = heap_in_use()
        self._resident_base = psutil.Process().memory_info().rss
        self._peak_allocated = self._peak_reserved = 0
        self.reset_peak()

    def figures(self) -> Memory:
        """Return the bytes in use, those taken from the system, and the peaks of both."""
        allocated = max(0, heap_in_use() - self._heap_base)
        reserved = max(allocated, psutil.Process().memory_info().rss - self._resident_base)
        peak = allocated
        if self._high_water_base is not None:
            high_water, allocated_then = self._high_water_base
            peak = max(peak, allocated_then + (high_water_mark() or 0) - high_water)
        self._peak_allocated = max(self._peak_allocated, peak)
        self._peak_reserved = max(self._peak_reserved, reserved, self._peak_allocated)
        return Memory(allocated, reserved, self._peak_allocated, self._peak_reserved)

    def reset_peak(self) -> None:
        """Let the peaks begin at the present figures."""
        self._peak_allocated = self._peak_reserved = 0
        self._high_water_base: tuple[int, int] | None = None
        allocated = self.figures().allocated
        if reset_high_water_mark() and (mark := high_water_mark()) is not None:
            self._high_water_base = (mark, allocated)


def heap_in_use() -> int:
    """Return the bytes malloc has handed out, or the resident set if psutil has no heap figures."""
    if hasattr(psutil, "heap_info"):
        heap = psutil.heap_info()
        return heap.heap_used + heap.mmap_used
    return psutil.Process().memory_info().rss


def high_water_mark() -> int | None:
    """Return the largest resident set so far, in bytes; None where Linux does not report it.

    Raises:
        OSError: There is no /proc, and so :func:`reset_high_water_mark` returns False.
    """
    found = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else None


def trim_heap() -> None:
    """Give memory that malloc holds and does not use back to the system, where psutil can."""
    if hasattr(psutil, "heap_trim"):
        psutil.heap_trim()


def reset_high_water_mark() -> bool:
    """Set the high-water mark to the current resident set. Return whether the system allows it."""
    # proc(5): writing 5 to clear_refs resets the peak resident set size to the current size.
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
