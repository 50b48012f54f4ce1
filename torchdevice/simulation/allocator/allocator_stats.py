"""The statistics of a device's allocator, as ``torch.cuda.memory_stats`` shows them.

Each has a current value, a peak, and the sums of its increases and decreases. With the limits of
the device's memory they make the text of CUDA's out-of-memory error
(c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torchdevice.kernel.devices.device_memory import Stat
from torchdevice.kernel.python.byte_sizes import written


class Figures:
    """Statistics of a kind of pool: current values, peaks (``peak_...``) and sums of increases.

    Attributes:
        allocated: Bytes of blocks that tensors have.
        requested: Bytes that were requested of the blocks in use.
        count: Blocks that tensors have.
        pending: Bytes of blocks that were freed while another stream may use them.
        pending_count: Number of these blocks.
        inactive: Bytes of free parts of segments that are in use, which the allocator cannot return
            to the driver.
        inactive_count: Number of these parts.
        reserved: Bytes of segments.
        segments: Number of segments.
        peak_active: The peak of ``allocated`` and ``pending`` together while blocks were pending.
        peak_active_count: The peak of ``count`` and ``pending_count`` together while blocks were
            pending.
        both: These, and the figures of everything, which count what these count.
    """

    allocated = peak_allocated = total_allocated = 0
    requested = peak_requested = total_requested = 0
    count = peak_count = total_count = 0
    pending = peak_pending = total_pending = 0
    pending_count = peak_pending_count = total_pending_count = 0
    inactive = peak_inactive = total_inactive = 0
    inactive_count = peak_inactive_count = total_inactive_count = 0
    reserved = peak_reserved = total_reserved = 0
    segments = peak_segments = total_segments = 0
    peak_active = peak_active_count = 0

    def __init__(self, whole: Figures | None = None) -> None:
        """Start at 0. ``whole`` counts everything counted here, except sums of increases."""
        self.both = (self,) if whole is None else (self, whole)
        self._parts: list[Figures] = []
        if whole is not None:
            # For the whole's sum of its parts' increases, which `add` does not count twice.
            whole._parts.append(self)
        self.forget_totals()

    def add(self, size: int, requested: int) -> None:
        """Add a block."""
        # Increases are counted in the part alone; `_totals` adds them up.
        self.total_allocated += size
        self.total_requested += requested
        self.total_count += 1
        # Local variables and no calls, as this runs at every allocation.
        for each in self.both:
            count = each.count = each.count + 1
            of_requests = each.requested = each.requested + requested
            allocated = each.allocated = each.allocated + size
            if allocated > each.peak_allocated:
                each.peak_allocated = allocated
            if of_requests > each.peak_requested:
                each.peak_requested = of_requests
            if count > each.peak_count:
                each.peak_count = count
            # Peaks of active and of allocated memory differ only while blocks are pending.
            if each.pending:
                each._raise_active()

    def remove(self, size: int, requested: int) -> None:
        """Subtract a block that a tensor had, and that is free again."""
        for each in self.both:
            each.allocated -= size
            each.requested -= requested
            each.count -= 1

    def suspend(self, size: int, count: int = 1) -> None:
        """Count a block without a tensor as pending, or undo that with -1 and a negative size."""
        for each in self.both:
            each.allocated -= size
            each.count -= count
            each.pending += size
            each.pending_count += count
            each._raise_active()

    def _raise_active(self) -> None:
        self.peak_active = max(self.peak_active, self.allocated + self.pending)
        self.peak_active_count = max(self.peak_active_count, self.count + self.pending_count)

    def change(self, name: str, by: int) -> None:
        """Add to a current value, raise its peak, and count an increase."""
        for each in self.both:
            value = getattr(each, name) + by
            setattr(each, name, value)
            if by > 0:
                setattr(each, f"total_{name}", getattr(each, f"total_{name}") + by)
                setattr(each, f"peak_{name}", max(getattr(each, f"peak_{name}"), value))

    def split(self, count: int, size: int) -> None:
        """Change the free parts of segments in use by so many parts and bytes."""
        if count > 0:
            self.total_inactive_count += count
        if size > 0:
            self.total_inactive += size
        for each in self.both:
            inactive = each.inactive = each.inactive + size
            inactive_count = each.inactive_count = each.inactive_count + count
            if inactive > each.peak_inactive:
                each.peak_inactive = inactive
            if inactive_count > each.peak_inactive_count:
                each.peak_inactive_count = inactive_count

    def count_anew(self, blocks: Collection[Any]) -> None:
        """Replace all counts by those of some blocks in use, each of which is a segment."""
        self.allocated = self.reserved = sum(block.size for block in blocks)
        self.requested = sum(block.requested for block in blocks)
        self.count = self.segments = len(blocks)
        self.pending = self.pending_count = self.inactive = self.inactive_count = 0
        # A peak is never below the current value.
        for name in _FIGURES:
            setattr(self, f"peak_{name}", max(getattr(self, f"peak_{name}"), getattr(self, name)))

    def forget_peaks(self) -> None:
        """Reset the peaks to the current values."""
        for name in _FIGURES:
            setattr(self, f"peak_{name}", getattr(self, name))
        self.peak_active = self.peak_active_count = 0
        self._raise_active()

    def forget_totals(self) -> None:
        """Reset the sums of increases and decreases to 0."""
        # Sums since the reset are differences, so that no counter is set to 0 while it is used.
        self._forgotten = {name: self._totals(name) for name in _FIGURES}
        self._waited = {name: getattr(self, name) for name in ("pending", "pending_count")}

    def _totals(self, name: str) -> tuple[int, int]:
        """Return the sums of a value's increases and decreases since the beginning."""
        if self._parts:
            sums = [part._totals(name) for part in self._parts]
            return sum(up for up, _ in sums), sum(down for _, down in sums)
        total: int = getattr(self, f"total_{name}")
        # The total subtracted: the total added, less the present value.
        return total, total - getattr(self, name)

    def stat(self, name: str) -> Stat:
        """Return one statistic."""
        up, down = (
            now - then for now, then in zip(self._totals(name), self._forgotten[name], strict=True)
        )
        return Stat(getattr(self, name), getattr(self, f"peak_{name}"), up, down)

    def active(self, name: str, pending: str, peak: str) -> Stat:
        """Return one statistic of the blocks that tensors have and of those that are pending."""
        stat, waiting = self.stat(name), getattr(self, pending)
        # Blocks that were pending at the reset are freed after it, hence the correction.
        freed = stat.freed - waiting + self._waited[pending]
        return Stat(
            stat.current + waiting, max(stat.peak, getattr(self, peak)), stat.allocated, freed
        )


_FIGURES = tuple(name for name in vars(Figures) if f"total_{name}" in vars(Figures))
"""The names of the current values."""

_VALUES = {
    "allocated_bytes": "allocated",
    "requested_bytes": "requested",
    "allocation": "count",
    "inactive_split_bytes": "inactive",
    "inactive_split": "inactive_count",
    "reserved_bytes": "reserved",
    "segment": "segments",
}
"""Key of ``torch.cuda.memory_stats`` -> the value of :class:`Figures`."""

_ACTIVE = {
    "active_bytes": ("allocated", "pending", "peak_active"),
    "active": ("count", "pending_count", "peak_active_count"),
}
"""Key of the blocks that are active -> three values of :class:`Figures`: in use, pending, the peak
of both.
"""

_NUMBERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


class Statistics:
    """The statistics of one device.

    Attributes:
        whole: The figures of all pools.
        of_pools: The figures of the small pools, under True, and of the large ones.
        counting: Both of these, as a tuple.
        numbers: Counters of driver calls, retries and out-of-memory errors.
        max_split_size: The bytes from which a block or segment counts as oversize; None for no
            limit.
    """

    def __init__(self) -> None:
        self.whole = Figures()
        self.of_pools = {True: Figures(self.whole), False: Figures(self.whole)}
        self.counting = (self.whole, *self.of_pools.values())
        self.max_split_size: int | None = None
        self._oversize = {"oversize_allocations": Figures(), "oversize_segments": Figures()}
        self.numbers = dict.fromkeys(_NUMBERS, 0)
        self._before_reset = (0, 0)

    def highest(self) -> tuple[int, int]:
        """Return the highest allocated and reserved bytes ever, whether or not peaks were reset."""
        allocated, reserved = self._before_reset
        whole = self.whole
        return max(allocated, whole.peak_allocated), max(reserved, whole.peak_reserved)

    def count_oversize(self, name: str, size: int, by: int) -> None:
        """Count a block or segment of ``size`` bytes, if it is oversize."""
        if self.max_split_size is not None and size >= self.max_split_size:
            self._oversize[name].change("count", by)

    def count_anew(self, used: Collection[Any]) -> None:
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
        pools = {
            "all": self.whole,
            "small_pool": self.of_pools[True],
            "large_pool": self.of_pools[False],
        }
        shown: dict[str, Any] = {}
        for key, name in _VALUES.items():
            shown[key] = {pool: figures.stat(name) for pool, figures in pools.items()}
        for key, names in _ACTIVE.items():
            shown[key] = {pool: figures.active(*names) for pool, figures in pools.items()}
        for name, figures in self._oversize.items():
            shown[name] = figures.stat("count")
        shown.update(self.numbers)
        shown["max_split_size"] = -1 if self.max_split_size is None else self.max_split_size
        return shown

    def forget_peaks(self) -> None:
        """Reset the peaks to the current values."""
        # First, so that an interrupt between two figures loses none.
        self._before_reset = self.highest()
        for each in (*self.counting, *self._oversize.values()):
            each.forget_peaks()

    def forget_totals(self) -> None:
        """Reset the sums of allocated and freed memory and the driver's call counts to 0."""
        for each in (*self.counting, *self._oversize.values()):
            each.forget_totals()
        self.numbers = dict.fromkeys(_NUMBERS, 0)


EXBIBYTE = 1 << 60
"""CUDA's allocator refuses requests of so many bytes before it looks for memory, with
:data:`OF_EXBIBYTES`.
"""

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


_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate {wanted}. GPU {index} has a total capacity of {total} "
    "of which {free} is free. Including non-PyTorch memory, this process has {reserved} memory in "
    "use. {allowed}Of the allocated memory {used} is allocated by PyTorch, {in_private}and "
    "{unused} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
    "documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


def out_of_memory_text(
    index: int, wanted: int, limits: Limits, figures: Figures, private: int
) -> str:
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
    if private:
        in_private = f"with {written(private)} allocated in private pools (e.g., CUDA Graphs), "
    else:
        in_private = ""
    sizes = {
        "wanted": wanted,
        "total": total,
        "free": free,
        "reserved": figures.reserved + limits.taken,  # no memory of other processes is simulated
        "used": figures.allocated + private,
        "unused": figures.reserved - figures.allocated - private,
    }
    shown = {name: written(size) for name, size in sizes.items()}
    return _OUT_OF_MEMORY.format(index=index, allowed=allowed, in_private=in_private, **shown)
