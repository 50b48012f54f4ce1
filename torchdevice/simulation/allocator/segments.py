"""The memory a device's allocator has from the driver: segments, each at its own address.

Expandable segments are ranges of addresses that get memory in units where they need it.

The addresses are the model's own: the values of a tensor lie elsewhere.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchdevice.kernel.devices.device_memory import Part, Segment
from torchdevice.simulation.allocator import memory_blocks
from torchdevice.simulation.allocator.allocator_stats import Statistics
from torchdevice.simulation.allocator.memory_blocks import (
    FREE,
    SHIFT,
    UNMAPPED,
    USED,
    Block,
    Pool,
    cut,
    joined,
)

# 2^51 is beyond the user addresses of every platform; 2^45 bytes are 32 TiB.
_FIRST_ADDRESS, _ADDRESSES = 1 << 51, 1 << 45
"""The addresses of the first device begin at the first number, and each device has as many as the
second. No process has memory there, so that the address of a tensor without values is never that of
another.
"""


Tell = Callable[[str, int, int, int], None]
"""Is called with each change of a segment: what happened, address, size and stream."""


class Segments:
    """The segments of one device.

    Args:
        index: The index of the device.
        number: A number that no other device in use has, on whatever machine.
        statistics: Counts the segments.
        tell: Is called with each change of a segment: what happened, address, size and stream.

    Attributes:
        heads: Address -> the first block of each segment.
        first: The address at which the first segment begins.
        end: The address at which the next one does.
    """

    def __init__(self, index: int, number: int, statistics: Statistics, tell: Tell):
        self.index, self.tell = index, tell
        self.heads: dict[int, Block] = {}
        self._statistics = statistics
        self.end = self.first = _FIRST_ADDRESS + number * _ADDRESSES

    def obtain(self, pool: Pool, size: int, total: int | None) -> Block | None:
        """Return a block of a pool that is a whole new segment; None without memory for it."""
        if not self.reserve(pool, size, total):
            return None
        pool.figures.change("segments", 1)
        self._statistics.count_oversize("oversize_segments", size, 1)
        block = self.begin(pool, size, USED)
        self.tell("segment_alloc", block.address, size, pool.stream)
        return block

    def begin(self, pool: Pool, size: int, state: int, unit: int = 1) -> Block:
        """Return a block that is a segment at new addresses, from a multiple of ``unit`` on."""
        # Without a segment the addresses begin again, so that equal programs have equal snapshots.
        if not self.heads:
            self.end = self.first
        # Ceiling division: expandable segments map whole units from their beginning.
        self.end = -(-self.end // unit) * unit
        block = self.heads[self.end] = Block(self.end, size, pool, state)
        self.end += size
        return block

    def release(self, block: Block) -> None:
        """Return a free block that is a whole segment to the driver."""
        pool = block.pool
        pool.take(block)
        self.give_back(pool, block.size)
        pool.figures.change("segments", -1)
        self._statistics.count_oversize("oversize_segments", block.size, -1)
        del self.heads[block.address]
        self.tell("segment_free", block.address, block.size, pool.stream)

    def reserve(self, pool: Pool, size: int, total: int | None) -> bool:
        """Count memory that a pool gets from the driver. Return whether the driver has as much."""
        if total is not None and self._statistics.whole.reserved + size > total:
            return False
        self._statistics.numbers["num_device_alloc"] += 1
        pool.figures.change("reserved", size)
        return True

    def give_back(self, pool: Pool, size: int) -> None:
        """Count memory that a pool returns to the driver."""
        self._statistics.numbers["num_device_free"] += 1
        pool.figures.change("reserved", -size)

    def shown(self, data: Mapping[Block, int]) -> list[Segment]:
        """Return segments by address; ``data`` has the addresses of the values of used blocks."""
        return [self._shown(run, data) for run in memory_blocks.runs_of(self.heads)]

    def _shown(self, blocks: Sequence[Block], data: Mapping[Block, int]) -> Segment:
        pool = blocks[0].pool
        parts = [
            Part(each.address, each.size, each.requested, _STATES[each.state], data.get(each, 0))
            for each in blocks
        ]
        return Segment(
            self.index, pool.stream, not pool.is_small, pool.expands, pool.owner, tuple(parts)
        )


_STATES = {USED: "active_allocated", memory_blocks.PENDING: "active_pending_free", FREE: "inactive"}


_address = operator.attrgetter("address")

_UNLIMITED = 1 << 44
"""The addresses of a segment on a device without a memory limit, in bytes."""


def best_expandable(pool: Pool, size: int) -> Block | None:
    """Return the best free block for a request, by the size that each block can grow to."""
    at = bisect_left(pool.keys, size << SHIFT)
    if at == len(pool.keys):
        return None
    found = pool.blocks[pool.keys[at]]
    # Blocks are sorted by size, but what counts is the size that a block can grow to; CUDA goes on
    # while that becomes smaller.
    for key in pool.keys[at + 1 :]:
        other = pool.blocks[key]
        if _reach(other) >= _reach(found):
            break
        found = other
    return found


def _reach(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)


def expand(segments: Segments, pool: Pool, size: int, unit: int, total: int | None) -> Block | None:
    """Return a block of at least ``size`` bytes, in no pool, for which memory is mapped in units.

    Args:
        segments: The segments of the device.
        pool: The pool of the block.
        size: The bytes that are needed.
        unit: The bytes that are mapped at once, or a multiple.
        total: The bytes of the device's memory, or None for no limit.

    Returns:
        The block; None where the driver has too little memory.
    """
    block: Block | None = _room(segments, pool, size, unit, total)
    if block is not None and block.state == UNMAPPED:
        # At most the block itself: what is needed beyond comes from the next block.
        block = _map(segments, block, min(block.size, size), unit, total)
    while block is not None and block.size < size:
        assert block.next is not None, "there was room for the request"
        block = _map(segments, block.next, min(size - block.size, block.next.size), unit, total)
    if block is not None:
        pool.take(block)
    return block


def _room(segments: Segments, pool: Pool, size: int, unit: int, total: int | None) -> Block:
    """Return the first of free and unmapped neighbours with enough addresses, lowest first."""
    for unmapped in pool.unmapped:
        first = unmapped.previous
        first = first if first is not None and first.state == FREE else unmapped
        if _free_addresses(first, size) >= size:
            return first
    # 1 + 1/8 of the device's memory, as CUDA reserves addresses.
    space = _UNLIMITED if total is None else total + total // 8
    # Whole units of addresses, at least enough for the request.
    block = segments.begin(pool, -(-max(space, size) // unit) * unit, UNMAPPED, unit)
    pool.unmapped.append(block)
    return block


def _free_addresses(block: Block | None, wanted: int) -> int:
    """Return the free bytes from a block on, up to one in use, or until ``wanted`` are found."""
    found = 0
    while block is not None and block.state in (FREE, UNMAPPED) and found < wanted:
        found += block.size
        block = block.next
    return found


def _map(segments: Segments, block: Block, size: int, unit: int, total: int | None) -> Block | None:
    """Map the beginning of an unmapped block. Return the free block that it then belongs to."""
    # Ceiling division: memory is mapped in whole units.
    pool, mapped = block.pool, -(-size // unit) * unit
    if not segments.reserve(pool, mapped, total):
        # The driver has no memory left; the addresses stay unmapped.
        return None
    pool.unmapped.remove(block)
    if mapped < block.size:
        insort(pool.unmapped, cut(block, mapped, UNMAPPED), key=_address)
    segments.tell("segment_map", block.address, mapped, pool.stream)
    block.state = FREE
    pool.put(block)
    # Merged with free neighbours, so that the caller gets one block that is large enough.
    return _merged(block, FREE, pool.take, pool.put)


def _merged(
    block: Block, state: int, take: Callable[[Block], Any], put: Callable[[Block], Any]
) -> Block:
    """Join a block with those of its neighbours that are in the same state. Return the whole."""
    # First with the block after it, then with the one before it, which may then include both.
    for first, second in ((block, block.next), (block.previous, block)):
        if first is not None and second is not None and first.state == second.state == state:
            take(first)
            take(second)
            block = joined(first, second)
            put(block)
    return block


def unmap(segments: Segments, block: Block, unit: int) -> None:
    """Return whole units of a free block to the driver. What remains of it stays free."""
    pool = block.pool
    # Only whole units within the block can be unmapped: round the start up and the end down.
    start = -(-block.address // unit) * unit
    end = (block.address + block.size) // unit * unit
    if start >= end:
        return
    pool.take(block)
    # The bytes at the end stay free; `cut` puts it into the pool.
    if end < block.address + block.size:
        cut(block, end - block.address, FREE)
    if start > block.address:
        rest = cut(block, start - block.address, UNMAPPED)
        pool.put(block)
        block = rest
    block.state = UNMAPPED
    insort(pool.unmapped, block, key=_address)
    segments.give_back(pool, end - start)
    segments.tell("segment_unmap", start, end - start, pool.stream)
    block = _merged(
        block,
        UNMAPPED,
        pool.unmapped.remove,
        lambda each: insort(pool.unmapped, each, key=_address),
    )
    # The whole segment is unmapped, so its addresses are given up.
    if not block.is_split:
        pool.unmapped.remove(block)
        del segments.heads[block.address]
