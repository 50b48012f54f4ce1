"""Expandable segments of CUDA's caching allocator: ranges of addresses that get memory in units where they need it."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from torchdevice.simulation.allocator.memory_blocks import FREE, SHIFT, UNMAPPED, Block, Pool, cut, joined
from torchdevice.simulation.allocator.segments import Segments

_address = operator.attrgetter("address")

_UNLIMITED = 1 << 44
"""The addresses of a segment on a device without a memory limit, in bytes."""


def best(pool: Pool, size: int) -> Block | None:
    """Return the free block that a request gets: the size of a block is the one that it can grow to."""
    at = bisect_left(pool.keys, size << SHIFT)
    if at == len(pool.keys):
        return None
    found = pool.blocks[pool.keys[at]]
    # Blocks are sorted by size, but what counts is the size that a block can grow to; CUDA goes on while that becomes
    # smaller.
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
    """Return the first of free and unmapped neighbours that have enough addresses, at the lowest address."""
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
    """Return the bytes of a block and of those after it until one is in use, or until ``wanted`` are found."""
    found = 0
    while block is not None and block.state in (FREE, UNMAPPED) and found < wanted:
        found += block.size
        block = block.next
    return found


def _map(segments: Segments, block: Block, size: int, unit: int, total: int | None) -> Block | None:
    """Give the beginning of an unmapped block memory. Return the free block that it is part of then."""
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


def _merged(block: Block, state: int, take: Callable[[Block], Any], put: Callable[[Block], Any]) -> Block:
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
    """Return the whole units within a free block to the driver. The rest of the block stays free."""
    pool = block.pool
    # Only units that lie wholly within the block can be unmapped: round the start up and the end down.
    start = -(-block.address // unit) * unit
    end = (block.address + block.size) // unit * unit
    if start >= end:
        return
    pool.take(block)
    # The rest at the end stays free; `cut` puts it into the pool.
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
    block = _merged(block, UNMAPPED, pool.unmapped.remove, lambda each: insort(pool.unmapped, each, key=_address))
    # The whole segment is unmapped, so its addresses are given up.
    if not block.is_split:
        pool.unmapped.remove(block)
        del segments.heads[block.address]
