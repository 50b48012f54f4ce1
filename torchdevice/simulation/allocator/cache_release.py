"""Which free segments are returned to the driver: all, or those too large to be split."""

from __future__ import annotations

from collections.abc import Iterable

from torchdevice.simulation.allocator import expandable_segments
from torchdevice.simulation.allocator.allocator_settings import Settings
from torchdevice.simulation.allocator.memory_blocks import Pool
from torchdevice.simulation.allocator.segments import Segments


def release_all(segments: Segments, pools: Iterable[Pool], settings: Settings) -> None:
    """Release the segments of some pools that have no block in use."""
    for pool in pools:
        for key in list(pool.keys):  # a copy, since releasing takes keys out
            block = pool.blocks[key]
            if pool.expands:
                expandable_segments.unmap(segments, block, settings.unit(is_small=pool.is_small))
            # A part of a segment cannot be returned alone.
            elif not block.is_split:
                segments.release(block)


def release_oversize(segments: Segments, pool: Pool, size: int, limit: int | None) -> bool:
    """Release blocks that are too large to be split, enough for a request. Return whether there were enough.

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
