"""Which blocks of a private pool are in use, kept and restored: what torch's trees of CUDA graphs need of an allocator.

Source: ``getCheckpointState`` and ``setCheckpointPoolState`` of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torchdevice.simulation.allocator.block_allocation import Blocks
from torchdevice.simulation.allocator.memory_blocks import PENDING, USED, Block, Owner, cut, runs_of


class Part(NamedTuple):
    """A block at a checkpoint.

    Attributes:
        size: Its size in bytes.
        requested: The bytes that were requested of it; None where it was free.
        data: The address of its values, where it was in use.
    """

    size: int
    requested: int | None
    data: int


class Checkpoint(NamedTuple):
    """A private pool at a checkpoint.

    Attributes:
        owner: The id of the pool.
        segments: Address -> the blocks from there on, without gaps.
    """

    owner: Owner
    segments: dict[int, list[Part]]

    def in_use(self) -> set[int]:
        """Return the addresses of the blocks that were in use."""
        # The address of a part is that of its segment and the sizes of the parts before it.
        return {
            address + sum(part.size for part in parts[:at])
            for address, parts in self.segments.items()
            for at, each in enumerate(parts)
            if each.requested is not None
        }


def taken(blocks: Blocks, owner: Owner, data: Mapping[Block, int]) -> Checkpoint:
    """Return a checkpoint of a pool. ``data`` has the addresses of the values of blocks in use."""
    runs = _runs(blocks, owner)
    return Checkpoint(owner, {run[0].address: [_part(each, data) for each in run] for run in runs})


def _runs(blocks: Blocks, owner: Owner) -> list[list[Block]]:
    """Return the blocks of a pool, those that follow each other without a gap together."""
    return [run for run in runs_of(blocks.segments.heads) if run[0].pool.owner == owner]


def _part(block: Block, data: Mapping[Block, int]) -> Part:
    # A block without values is known by its own address.
    return Part(block.size, block.requested if block.state == USED else None, data.get(block, block.address))


def in_use(blocks: Blocks, owner: Owner) -> list[Block]:
    """Return the blocks of a pool that are in use."""
    return [block for run in _runs(blocks, owner) for block in run if block.state in (USED, PENDING)]


def restored(blocks: Blocks, checkpoint: Checkpoint) -> dict[Block, int]:
    """Free the blocks of a pool, and use those that were in use at the checkpoint.

    Returns:
        The blocks in use, with the address of the values of each at the checkpoint.
    """
    # All blocks are freed first, and joined, so that the parts can be cut from whole segments.
    blocks.freed.extend(in_use(blocks, checkpoint.owner))
    # Frees what waits for other streams too; a checkpoint knows no pending blocks.
    blocks.host_waited()
    starts = {run[0].address: run[0] for run in _runs(blocks, checkpoint.owner)}
    found: dict[Block, int] = {}
    for address, parts in checkpoint.segments.items():
        found.update(_laid_out(blocks, starts[address], parts))
    return found


def _laid_out(blocks: Blocks, free: Block, parts: Iterable[Part]) -> Iterator[tuple[Block, int]]:
    """Divide a free block. Yield the parts in use, with the addresses of their values."""
    block: Block | None = free
    pool = free.pool
    pool.take(free)
    for part in parts:
        assert block is not None
        # The rest is in no pool yet, so it is cut as if it were in use.
        rest = cut(block, part.size, USED) if block.size > part.size else None
        if part.requested is None:
            _leave(block)
        else:
            blocks.occupy(block, part.requested)
            yield block, part.data
        block = rest
    # What the segment has beyond the parts of the checkpoint.
    if block is not None:
        _leave(block)


def _leave(block: Block) -> None:
    block.pool.put(block)
    # As `free` counts it: a free part of a segment in use is inactive.
    if block.is_split and not block.pool.expands:
        block.pool.figures.split(1, block.size)
