"""Which block a request gets, and the end of a freed one.

A request gets the smallest free block of its stream's pool that is large enough, without the part
that it does not need, else a block of a new segment. A free block is merged with its free
neighbours. Segments stay reserved until the cache is emptied or memory runs out.

Source: torch's notes on CUDA's memory management, and the comments of
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

import torch

from torchdevice.simulation.allocator.allocator_settings import DEFAULT, Settings
from torchdevice.simulation.allocator.allocator_stats import Limits, Statistics, out_of_memory_text
from torchdevice.simulation.allocator.memory_blocks import (
    FREE,
    GONE,
    LATE,
    PENDING,
    SHIFT,
    USED,
    Block,
    Pool,
    cut,
    joined,
)
from torchdevice.simulation.allocator.pool_choice import Pools
from torchdevice.simulation.allocator.rounding import (
    MINIMUM,
    SMALL,
    mapped_unit,
    rounded,
    segment_size,
)
from torchdevice.simulation.allocator.segments import Segments, Tell, best_expandable, expand, unmap
from torchdevice.torch_modules.cuda import capture_rules

# 2^62 is beyond the addresses of every device; the step leaves room for the largest block.
_LATE_ADDRESSES = itertools.count(1 << 62, 1 << 40)
"""The addresses of late blocks until they have a place. No segment is there."""


LimitsOf = Callable[[int], tuple[int | None, int | None, int]]
"""Returns the fields of :class:`Limits` for a device."""

ErrorOf = Callable[[int, int, int, int], Exception | None]
"""Returns the error where memory runs out, given the bytes that were wanted, those in use, those of
the device and those that the program may use; None for CUDA's.
"""


class Blocks:
    """The blocks of one device. One thread may use them at a time.

    Args:
        index: The index of the device.
        number: A number that no other device in use has.
        limits: Returns the limits of the device; asked where a new segment is needed.
        error: Returns the error where memory runs out, given the bytes that were wanted, those in
            use, those of the device and those that the program may use; None for CUDA's.
        tell: Is called with each change of a segment: what happened, address, size and stream.

    Attributes:
        ended: The ended storages of all devices, in this order. Its ``release`` gives the block to
            its device's ``freed``.
        freed: The blocks without an owner, and late ones, in this order.
        held: Number of the memory of a storage that C++ made -> its block, and the address of its
            values.
        late: Functions to call when the change in progress has ended.
        pending: The freed blocks that another stream may still use.
        pools: The pools of free blocks.
        refused: The last expected error, after which no recovery is needed.
        segments: The memory that the device has from the driver.
        settings: The settings of the allocator.
        statistics: The statistics of the device.
    """

    # One for all devices: an allocation also releases ended storages of machines that nobody uses
    # any more.
    ended: ClassVar[deque[Any]] = deque()  # appended to by weak references, in C, see `storages.py`

    def __init__(
        self, index: int, number: int, limits: LimitsOf, error: ErrorOf, tell: Tell
    ) -> None:
        self.freed: deque[Block] = deque()
        self.held: dict[int, tuple[Block, int]] = {}
        self.late: deque[Callable[[], object]] = deque()
        self.pending: list[Block] = []
        self.refused: Exception | None = None
        self.statistics = Statistics()
        self.pools = Pools(self.statistics.of_pools)
        self.segments = Segments(index, number, self.statistics, tell)
        self._index = index
        self._limits = limits
        self._error = error
        self._routes = self.pools.routes  # the same list: an attribute less in `_stays`
        self.configure(DEFAULT)

    def configure(self, settings: Settings) -> None:
        """Use other settings from now on. Blocks and segments stay as they are."""
        self.settings = settings
        self.statistics.max_split_size = self._oversized = settings.max_split_size
        # With default settings, a request of the size freed last is quickly answered.
        self._is_plain = settings == DEFAULT

    def lay_out_anew(self, live: Collection[Block]) -> None:
        """Give each block of a storage a segment of its own, and drop the cache."""
        # A set, since the same block may be asked for several times below.
        used = {block for block in live if block.state != GONE}
        # By number and not until it is empty, because the loop appends what it keeps.
        for _ in range(len(self.freed)):  # storages may end meanwhile, and append theirs
            block = self.freed.popleft()
            if block in used and block.state != LATE:
                self.freed.append(block)
        self.pending = []
        self.pools.clear()
        for block in used:
            pool = block.pool
            block.pool = self.pools.pool(pool.stream, pool.is_small, pool.owner)
            # Alone in its segment, so nothing is merged or split until it is freed.
            block.previous = block.next = None
            block.state = USED
        self.segments.heads = {block.address: block for block in used}
        # The peaks stay: they are of the past.
        self.statistics.count_anew(used)

    # ---- requests --------------------------------------------------------------------------------

    def allocate(self, requested: int, stream: int) -> Block:
        """Return a block for a request of ``requested`` bytes on a stream.

        Raises:
            torch.OutOfMemoryError: The device has too little memory left. The text is CUDA's.
        """
        freed = self.freed
        # Blocks are freed only when the next request comes; most often the tensor just dropped has
        # the size of the new one.
        if freed:
            # One block alone: with several, the best fit has to be searched.
            if (
                len(freed) == 1
                and freed[0].requested == requested
                and self._stays(freed[0], stream)
            ):
                block = freed.popleft()
                figures = block.pool.figures
                figures.total_allocated += block.size
                figures.total_requested += requested
                figures.total_count += 1
                return block
            self.settle()
        if self._is_plain:
            size = (requested + MINIMUM - 1) & -MINIMUM
        else:
            size = rounded(requested, self.settings)
        pool = self.pools.serving(stream, size <= SMALL)
        # `or`: no block is false, since blocks define no length or truth.
        return self.give(self._find(pool, size) or self._obtain(pool, size), size, requested)

    def allocate_meanwhile(self, requested: int, stream: int) -> Block:
        """Serve a request that a destructor makes within a change, without a change of its own."""
        size = rounded(requested, self.settings)
        block = Block(next(_LATE_ADDRESSES), size, self.pools.serving(stream, size <= SMALL), LATE)
        block.requested = requested
        self.freed.append(block)
        return block

    def _place(self, late: Block) -> None:
        """Give a late block its place, even beyond the memory left: a tensor has it already."""
        pool, size = late.pool, late.size
        # The limit is not asked: the tensor exists already.
        found = self._find(pool, size)
        if found is None:
            found = self.segments.obtain(pool, segment_size(size, self.settings), None)
        assert found is not None
        found = self.give(found, size, late.requested)
        late.replace(found)
        # A block that begins a segment is known by its address there.
        if self.segments.heads.get(found.address) is found:
            self.segments.heads[found.address] = late

    def _stays(self, block: Block, stream: int) -> bool:
        """Return whether a freed block serves an equal request; if so, count both in statistics.

        Nothing else changes then: the block would be freed, be found first, and have its rest split
        off again.
        """
        # One function, since every second allocation comes here: three would take 15 % longer.
        pool = block.pool
        size = block.size
        previous = block.previous
        after = block.next
        # Only the plain case: no private pool, other stream, settings, route or use.
        if (
            not pool.is_usual
            or pool.stream != stream
            or not self._is_plain
            or self._routes
            or block.uses
        ):
            return False
        # A free neighbour before it would be merged, and the request would begin there.
        if block.state != USED or (previous is not None and previous.state == FREE):
            return False
        # The block may be larger than its request, if its rest was too small to be split off.
        wanted = (block.requested + MINIMUM - 1) & -MINIMUM
        rest = after.size if after is not None and after.state == FREE else 0
        # A free rest would be merged and split again; this must give the same block.
        if rest and (size != wanted or not (pool.is_small or rest > SMALL)):
            return False
        keys, address = pool.keys, block.address
        # The smallest free block that is large enough.
        at = bisect_left(keys, wanted << SHIFT)
        if at < len(keys):
            found = keys[at]
            if rest and found == rest << SHIFT | (address + size):  # the rest itself
                found = keys[at + 1] if at + 1 < len(keys) else found << SHIFT
            # A smaller block, or one of the same size at a lower address, would be taken instead.
            if found < (size + rest) << SHIFT | address:
                return False
        if rest and after is not None:
            after.requested = 0  # a new rest would be split off
        # What freeing and splitting would have added to the peaks and sums for a moment.
        is_part = previous is not None or (
            after is not None and (not rest or after.next is not None)
        )
        count, inactive = (not rest, size) if is_part else (bool(rest), rest)
        pool.figures.total_inactive_count += count
        pool.figures.total_inactive += inactive
        # No call for each: every second allocation comes here.
        for figures in pool.figures.both if is_part else ():
            if figures.inactive + size > figures.peak_inactive:
                figures.peak_inactive = figures.inactive + size
            if figures.inactive_count + count > figures.peak_inactive_count:
                figures.peak_inactive_count = figures.inactive_count + count
        return True

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Take the free block that fits a request best out of its pool; None if none fits."""
        if self._is_plain:
            # Keys sort by size, then address, so the first that is large enough fits best.
            keys = pool.keys
            at = bisect_left(keys, size << SHIFT)
            # Popped in one line, so that keys and blocks agree after any interrupt.
            return pool.blocks.pop(keys.pop(at)) if at < len(keys) else None
        found = self._fitting(pool, size)
        if found is not None:
            found.pool.take(found)
        return found

    def _fitting(self, pool: Pool, size: int) -> Block | None:
        found = pool.first(size)
        if self.settings.expandable_segments:
            expanded = best_expandable(self._expanding(pool), size)
            # The better one by key: size first, then address.
            if found is None or (expanded is not None and expanded.key < found.key):
                found = expanded
        limit = self._oversized
        if found is None or limit is None:
            return found
        # A block above the limit serves only requests above the limit, and not far smaller ones.
        too_much = limit if size < limit else size + self.settings.max_non_split_rounding
        return None if found.size >= too_much else found

    def _expanding(self, pool: Pool) -> Pool:
        """Return the pool of the blocks in expandable segments for the same requests."""
        return self.pools.pool(pool.stream, pool.is_small, pool.owner, expands=True)

    def give(self, block: Block, size: int, requested: int) -> Block:
        """Allocate a block that is in no pool, after cutting off the bytes beyond ``size``."""
        # Read before `cut`, which makes the block a part of a split segment.
        pool = block.pool
        rest = block.size - size
        was_split = block.is_split
        if rest and self._splits(pool, size, rest):
            cut(block, size, FREE)
            if not pool.expands:
                # A split segment loses a free part of this size; a whole one gains the rest.
                pool.figures.split(*((0, -size) if was_split else (1, rest)))
        elif was_split and not pool.expands:
            pool.figures.split(-1, -block.size)
        block.state, block.requested = USED, requested
        pool.figures.add(block.size, requested)
        if self._oversized is not None:
            self.statistics.count_oversize("oversize_allocations", block.size, 1)
        return block

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.is_small or self.settings.expandable_segments:
            # CUDA keeps rests of at most 1 MiB in large pools with their block.
            return rest >= MINIMUM
        return rest > SMALL and (self._oversized is None or size < self._oversized)

    # ---- new segments ----------------------------------------------------------------------------

    def limits(self) -> Limits:
        """Return the present limits of the device."""
        return Limits(*self._limits(self._index))

    def _obtain(self, pool: Pool, size: int) -> Block:
        """Return a block of a new segment, for which the cache is emptied if that is necessary."""
        limits, wanted = self.limits(), segment_size(size, self.settings)
        found = self._new(pool, size, wanted, limits)
        # In CUDA's order: oversize blocks, then the whole cache.
        if found is None and release_oversize(self.segments, pool, size, self._oversized):
            found = self._new(pool, size, wanted, limits)
        # CUDA cannot free memory while it captures.
        if found is None and capture_rules.current_capture() is None:
            self.release_cached()
            self.statistics.numbers["num_alloc_retries"] += 1
            found = self._new(pool, size, wanted, limits)
        if found is None:
            self.statistics.numbers["num_ooms"] += 1
            total = limits.total or 0
            error = self._error(
                wanted, self.statistics.whole.allocated, total, limits.allowed or total
            )
            # An expected error: no recovery is needed after it.
            self.refused = error or torch.OutOfMemoryError(self.out_of_memory(wanted, limits))
            raise self.refused
        return found

    def _new(self, pool: Pool, size: int, wanted: int, limits: Limits) -> Block | None:
        """Return a block of a new or expandable segment of ``wanted`` bytes, or None."""
        # Checked before the driver is asked, as `set_per_process_memory_fraction` does.
        if limits.allowed is not None and self.statistics.whole.reserved + wanted > limits.allowed:
            return None
        if self.settings.expandable_segments:
            unit = mapped_unit(self.settings, is_small=pool.is_small)
            return expand(self.segments, self._expanding(pool), size, unit, limits.room)
        return self.segments.obtain(pool, wanted, limits.room)

    def release_cached(self) -> None:
        """Wait for the device, and return the segments without a block in use to the driver."""
        pools, capture = self.pools.unused(), capture_rules.current_capture()
        if capture is None:
            self.statistics.numbers["num_sync_all_streams"] += 1
            self.host_waited()
        elif capture.order.is_unsafe_here and _has_whole_segments(pools):
            capture.failed, self.refused = True, capture_rules.error(capture_rules.NOT_PERMITTED)
            raise self.refused
        release_all(self.segments, pools, self.settings)

    def out_of_memory(self, wanted: int, limits: Limits) -> str:
        """Return the text of CUDA's error where the driver was asked for ``wanted`` bytes."""
        return out_of_memory_text(
            self._index, wanted, limits, self.statistics.whole, self.pools.free_in_private()
        )

    # ---- freed blocks ----------------------------------------------------------------------------

    def release_ended(self) -> None:
        """Release ended storages."""
        ended = self.ended
        # Popped before it is released, so that an interrupt releases nothing twice.
        try:
            while ended:
                ended.popleft().release()
        except IndexError:  # another thread was faster
            return

    def settle(self) -> None:
        """Free the blocks without an owner, and call functions deferred during a change."""
        # Not a `for` loop: storages may end meanwhile and append to the list.
        while self.freed:
            block = self.freed.popleft()
            if block.state != USED:
                if block.state == LATE:
                    self._place(block)
                continue
            if self._oversized is not None:
                self.statistics.count_oversize("oversize_allocations", block.size, -1)
            if block.uses:
                block.state = PENDING
                block.pool.figures.suspend(block.size)
                self.pending.append(block)
            else:
                self.free(block)
        # After the blocks, since these calls may ask for memory.
        while self.late:
            self.late.popleft()()

    def host_waited(self) -> None:
        """Free the blocks freed while another stream used them, as the host has waited."""
        self.release_ended()
        self.settle()
        # Exchanged first: a storage that ends meanwhile appends to the new list.
        pending, self.pending = self.pending, []
        for block in pending:
            block.uses = None
            block.pool.figures.suspend(-block.size, -1)
            self.free(block)

    def free(self, block: Block) -> None:
        """Put a block into its pool, with its free neighbours."""
        block.state = FREE  # also where its neighbour takes it in
        pool = block.pool
        count = 0
        inactive = 0
        # The statistics count whole blocks, so before the neighbours are joined.
        pool.figures.remove(block.size, block.requested)
        after, previous = block.next, block.previous
        if after is not None and after.state == FREE:
            pool.take(after)
            # A free neighbour was counted as an inactive part of the segment, and is none any more.
            count, inactive = -1, -after.size
            joined(block, after)
        if previous is not None and previous.state == FREE:
            pool.take(previous)
            count, inactive = count - 1, inactive - previous.size
            block = joined(previous, block)
        pool.put(block)
        # A block that is its whole segment is no inactive part: it can be given back.
        if block.is_split:
            count, inactive = count + 1, inactive + block.size
        if (count or inactive) and not pool.expands:
            pool.figures.split(count, inactive)


# ---- which free segments are returned to the driver ----------------------------------------------


def _has_whole_segments(pools: Iterable[Pool]) -> bool:
    """Return whether a free block of some pool is a segment of its own."""
    return any(not pool.blocks[key].is_split for pool in pools for key in pool.keys)


def release_all(segments: Segments, pools: Iterable[Pool], settings: Settings) -> None:
    """Release the segments of some pools that have no block in use."""
    for pool in pools:
        for key in list(pool.keys):  # a copy, since releasing takes keys out
            block = pool.blocks[key]
            if pool.expands:
                unmap(segments, block, mapped_unit(settings, is_small=pool.is_small))
            # A part of a segment cannot be returned alone.
            elif not block.is_split:
                segments.release(block)


def release_oversize(segments: Segments, pool: Pool, size: int, limit: int | None) -> bool:
    """Release enough blocks too large to be split for a request. Return whether there were enough.

    Args:
        segments: The segments of the device.
        pool: The pool that serves the request.
        size: The bytes of the request.
        limit: The bytes from which blocks are not split; None for no limit.
    """
    if limit is None:
        return False
    # A block below the limit is no oversize block, however small the request is.
    wanted = max(size, limit)
    # One block that is large enough is better than several, as in CUDA.
    first = pool.first(wanted)
    if first is not None:
        segments.release(first)
        return True
    released = 0
    # Keys sort by size: the largest first.
    for key in reversed(pool.keys):
        block = pool.blocks[key]
        if released >= wanted or block.size < limit:
            break
        released += block.size
        if not block.is_split:
            segments.release(block)
    return released >= wanted
