"""Checkpoints of a private pool, whose segments can be laid out again, as for trees of CUDA graphs.

Source: ``setCheckpointPoolState`` of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set

from torchdevice.simulation.allocator.block_allocation import Blocks
from torchdevice.simulation.allocator.memory_blocks import FREE, GONE, USED, Block, Owner, chain_of

Parts = list["tuple[Block, int | None]"]
"""A copy of each block of a segment, and the address of its values, which is None for a block that
no tensor has.
"""

Checkpoint = Mapping[int, Parts]
"""Address of a segment -> its blocks."""


def live(data: Mapping[Block, int], owner: Owner) -> dict[int, Block]:
    """Return a pool's allocated blocks by their values' address; ``data`` has all pools'."""
    return {
        values: block
        for block, values in data.items()
        if block.pool.owner == owner and block.state == USED
    }


def _heads(blocks: Blocks, owner: Owner) -> list[Block]:
    """Return the first block of each of a pool's segments. Expandable ones have no checkpoints."""
    return [
        head
        for head in blocks.segments.heads.values()
        if head.pool.owner == owner and not head.pool.expands
    ]


def taken(blocks: Blocks, data: Mapping[Block, int], owner: Owner) -> Checkpoint:
    """Return the segments of a pool."""
    chains = {head.address: chain_of(head) for head in _heads(blocks, owner)}
    return {
        address: [(copy.copy(each), data.get(each)) for each in chain]
        for address, chain in chains.items()
    }


def restore(
    blocks: Blocks, data: Mapping[Block, int], owner: Owner, checkpoint: Checkpoint, stale: Set[int]
) -> dict[int, Block]:
    """Let the segments of a pool be as they were. Those that it got since become free.

    Args:
        blocks: The blocks of the device.
        data: The address of the values of each block that a tensor has.
        owner: The id of the pool.
        checkpoint: The result of :func:`taken`.
        stale: The addresses of the values of tensors that lose their blocks.

    Returns:
        The blocks that are in use again and that no tensor has, by the address of the values.

    Raises:
        RuntimeError: Other tensors would lose their blocks. The text is torch's
            (torch/csrc/cuda/Module.cpp).
    """
    known = live(data, owner)
    lost = [known.pop(values) for values in stale & known.keys()]
    now = {(block.address, values) for values, block in known.items()}
    then = {(block.address, values) for parts in checkpoint.values() for block, values in parts}
    if now - then:
        # An expected error: no recovery is needed after it.
        text = "Any stale tensors which are being manually freed must be passed to set checkpoint"
        blocks.refused = RuntimeError(text)
        raise blocks.refused
    _free_segments(blocks, owner)
    for each in lost:
        each.state = GONE
    found: dict[int, Block] = {}
    for address, parts in checkpoint.items():
        divided = _divided(blocks, address, parts)
        for block, (_, values) in zip(divided, parts, strict=True):
            if values is None:
                blocks.free(block)
            elif values not in known:
                found[values] = block
            else:
                known[values].replace(block)
                if block.previous is None:
                    blocks.segments.heads[address] = known[values]
    return found


def _free_segments(blocks: Blocks, owner: Owner) -> None:
    """Let each segment of a pool be one free block."""
    for head in _heads(blocks, owner):
        for block in [each for each in chain_of(head) if each.state == USED]:
            blocks.free(block)
        head.pool.take(head)
        # A new one, since the old one may be a tensor's.
        whole = blocks.segments.heads[head.address] = Block(
            head.address, head.size, head.pool, FREE
        )
        head.pool.put(whole)


def _divided(blocks: Blocks, address: int, parts: Parts) -> list[Block]:
    """Divide a free segment into blocks in use, and return them."""
    divided, rest = [], blocks.segments.heads.get(address)
    for each, _ in parts:
        assert rest is not None, (
            "the pool keeps its segments, and these have the size of their parts"
        )
        rest.pool.take(rest)
        divided.append(blocks.give(rest, each.size, each.requested))
        rest = rest.next
    return divided
