"""The limits of a device's memory, and the text of CUDA's out-of-memory error.

Source: c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from typing import NamedTuple

from torchdevice.foundation import torch_texts
from torchdevice.foundation.byte_sizes import written
from torchdevice.simulation.allocator.allocator_stats import Figures

EXBIBYTE = 1 << 60
"""CUDA's allocator refuses requests of so many bytes before it looks for memory, with :data:`OF_EXBIBYTES`."""

OF_EXBIBYTES = "CUDA out of memory. Tried to allocate more than 1EB memory."


class Limits(NamedTuple):
    """The limits of a device's memory.

    Attributes:
        total: Its memory in bytes, or None for no limit.
        allowed: The bytes that the program allows itself, or None for no such limit.
        taken: The bytes that CUDA's context takes.
    """

    total: int | None = None
    allowed: int | None = None
    taken: int = 0

    @property
    def room(self) -> int | None:
        """The bytes that the allocator can have."""
        return None if self.total is None else self.total - self.taken


def text(index: int, wanted: int, limits: Limits, figures: Figures, private: int) -> str:
    """Return the text of CUDA's error.

    Args:
        index: The index of the device.
        wanted: The bytes that were wanted of the driver.
        limits: The limits of the device.
        figures: The figures of all pools.
        private: The bytes of free blocks in private pools.
    """
    total = limits.total or 0
    # Never negative: a request for more than this machine has comes with this machine's total.
    free = max(0, total - limits.taken - figures.reserved)
    allowed = "" if limits.allowed is None else f"{written(limits.allowed)} allowed; "
    in_private = f"with {written(private)} allocated in private pools (e.g., CUDA Graphs), " if private else ""
    sizes = {
        "wanted": wanted,
        "total": total,
        "free": free,
        "reserved": figures.reserved + limits.taken,  # no memory of other processes is simulated
        "used": figures.allocated + private,
        "unused": figures.reserved - figures.allocated - private,
    }
    shown = {name: written(size) for name, size in sizes.items()}
    return torch_texts.text("out of memory", index=index, allowed=allowed, in_private=in_private, **shown)
