"""The statistics of a device's allocator, as ``torch.cuda.memory_stats`` shows them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torchdevice.simulation.allocator.memory_blocks import Block
from torchdevice.simulation.allocator.pool_stats import Figures, shown

_NUMBERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


class Statistics:
    """The statistics of one device.

    Attributes:
        whole: The figures of all pools.
        of_pools: The figures of the small pools, under True, and of the large ones.
        counting: Both of these, as a tuple.
        numbers: How often the driver was called, and what memory that ran out led to.
        max_split_size: The bytes from which a block or segment counts as oversize; None for no limit.
    """

    def __init__(self) -> None:
        self.whole = Figures()
        self.of_pools = {True: Figures(self.whole), False: Figures(self.whole)}
        self.counting = (self.whole, *self.of_pools.values())
        self.max_split_size: int | None = None
        self._oversize = {"oversize_allocations": Figures(), "oversize_segments": Figures()}
        self.numbers = dict.fromkeys(_NUMBERS, 0)

    def count_oversize(self, name: str, size: int, by: int) -> None:
        """Count a block or segment of ``size`` bytes, if it is oversize."""
        if self.max_split_size is not None and size >= self.max_split_size:
            self._oversize[name].change("count", by)

    def count_anew(self, used: Collection[Block]) -> None:
        """Replace all counts by those of some blocks in use, each of which is a segment."""
        for is_small, figures in self.of_pools.items():
            figures.count_anew([block for block in used if block.pool.is_small is is_small])
        self.whole.count_anew(used)
        most = self.max_split_size
        oversize = [block for block in used if most is not None and block.size >= most]
        for figures in self._oversize.values():
            figures.count_anew(oversize)

    def shown(self) -> dict[str, Any]:
        """Return all statistics, under the keys of ``torch.cuda.memory_stats``."""
        return {
            **shown({"all": self.whole, "small_pool": self.of_pools[True], "large_pool": self.of_pools[False]}),
            **{name: figures.stat("count") for name, figures in self._oversize.items()},
            **self.numbers,
            "max_split_size": -1 if self.max_split_size is None else self.max_split_size,
        }

    def forget_peaks(self) -> None:
        """Reset the peaks to the current values."""
        for each in (*self.counting, *self._oversize.values()):
            each.forget_peaks()

    def forget_totals(self) -> None:
        """Reset the sums of allocated and freed memory, and the numbers of calls of the driver, to 0."""
        for each in (*self.counting, *self._oversize.values()):
            each.forget_totals()
        self.numbers = dict.fromkeys(_NUMBERS, 0)
