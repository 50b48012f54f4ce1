"""Figures of the operating system: the memory of this process, and the name of the processor."""

from __future__ import annotations

import functools
import platform
import re

import psutil


@functools.lru_cache(maxsize=1)
def processor_name() -> str:
    """Return the processor's name, from /proc/cpuinfo or from Python's platform module."""
    try:
        with open("/proc/cpuinfo") as file:
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def heap_in_use() -> int:
    """Return the bytes that malloc has handed out, or the resident set where psutil has no figures of the heap."""
    if hasattr(psutil, "heap_info"):
        heap = psutil.heap_info()
        return heap.heap_used + heap.mmap_used
    return psutil.Process().memory_info().rss


def resident(process: psutil.Process) -> int:
    """Return the bytes of a process's resident set; 0 for a process that has ended."""
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # it ended while it was looked at
        return 0


def high_water_mark() -> int | None:
    """Return the largest resident set so far, in bytes; None where the system does not report it."""
    try:
        with open("/proc/self/status") as file:
            found = re.search(r"^VmHWM:\s*(\d+) kB$", file.read(), re.M)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def reset_high_water_mark() -> bool:
    """Reset the high-water mark to the current resident set. Return whether the system allows it."""
    # proc(5): writing 5 to clear_refs resets the peak resident set size to the current size.
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True
