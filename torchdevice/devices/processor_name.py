"""The name of the processor."""

from __future__ import annotations

import functools
import platform
import re


@functools.lru_cache(maxsize=1)
def processor_name() -> str:
    """Return the processor's name, from /proc/cpuinfo or from Python's platform module."""
    try:
        with open("/proc/cpuinfo") as file:
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
