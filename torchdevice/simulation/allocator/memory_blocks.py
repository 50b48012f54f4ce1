"""Blocks of memory, the chains in which they lie in segments, and the pools of free blocks."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Any

from torchdevice.simulation.allocator.allocator_stats import Figures

SHIFT = 64  # addresses fit into 64 bits
"""The key of a free block is its size, shifted by so many bits, and its address: keys sort by size,
then by address.
"""

USED, FREE, PENDING, UNMAPPED, LATE, GONE = range(6)
"""The states of a block. A pending one is free for the program, and another stream may still use
it. A late one was given away in the middle of a change of the memory, and gets its place when the
change has ended. One that is gone was freed though a tensor has it.
"""

Owner = tuple[int, int]
"""The id of a private pool; (0, 0) means no private pool."""

NOBODY: Owner = (0, 0)  # as torch's `MempoolId_t{0, 0}`


class Block:
    """A part of a segment.

    Attributes:
        address: The address in the device's memory.
        size: The size in bytes.
        requested: The bytes that were requested of it.
        pool: The pool that it belongs to.
        previous: The block before it in its segment.
        next: The block after it in its segment.
        state: One of the states above.
        uses: The other streams for which ``record_stream`` was called.
    """

    __slots__ = ("address", "next", "pool", "previous", "requested", "size", "state", "uses")

    def __init__(self, address: int, size: int, pool: Pool, state: int):
        self.address = address
        self.size = size
        self.requested = 0
        self.pool = pool
        self.previous: Block | None = None
        self.next: Block | None = None
        self.state = state
        # None instead of an empty set: nearly no block is used by other streams.
        self.uses: set[Any] | None = None

    def replace(self, other: Block) -> None:
        """Replace a block in its segment."""
        # All but `uses`, which the late block has of its own.
        for name in ("address", "size", "requested", "pool", "previous", "next", "state"):
            setattr(self, name, getattr(other, name))
        if self.previous is not None:
            self.previous.next = self
        if self.next is not None:
            self.next.previous = self

    @property
    def is_split(self) -> bool:
        """Whether it is not the whole of its segment."""
        return self.previous is not None or self.next is not None

    @property
    def key(self) -> int:
        """The key of the block while it is free."""
        return self.size << SHIFT | self.address


class Pool:
    """The free blocks of one stream, of one class of sizes.

    Attributes:
        stream: The id of the stream.
        is_small: Whether it is for small blocks.
        owner: The private pool that it belongs to.
        expands: Whether its segments are expandable.
        figures: The statistics that count its blocks.
        keys: The keys of the free blocks, sorted.
        blocks: Key -> free block.
        unmapped: The parts of expandable segments that have no memory, sorted by address.
        is_usual: Whether it belongs to no private pool, and has segments of a fixed size.
    """

    __slots__ = (
        "blocks",
        "expands",
        "figures",
        "is_small",
        "is_usual",
        "keys",
        "owner",
        "stream",
        "unmapped",
    )

    def __init__(self, stream: int, is_small: bool, owner: Owner, expands: bool, figures: Figures):
        self.stream = stream
        self.is_small = is_small
        self.owner = owner
        self.expands = expands
        self.is_usual = owner == NOBODY and not expands
        self.figures = figures
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []

    def clear(self) -> None:
        """Forget all blocks."""
        for blocks in (self.keys, self.blocks, self.unmapped):
            blocks.clear()  # type: ignore[attr-defined]

    def put(self, block: Block) -> None:
        """Add a free block."""
        block.state = FREE
        key = block.size << SHIFT | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def take(self, block: Block) -> None:
        """Remove a free block."""
        key = block.size << SHIFT | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def first(self, size: int) -> Block | None:
        """Return the smallest free block of ``size`` bytes or more, at the lowest address."""
        at = bisect_left(self.keys, size << SHIFT)
        return self.blocks[self.keys[at]] if at < len(self.keys) else None


def chain_of(block: Block | None) -> Iterator[Block]:
    """Yield a block and those after it."""
    while block is not None:
        yield block
        block = block.next


def runs_of(heads: Mapping[int, Block]) -> Iterator[list[Block]]:
    """Yield blocks with memory by address, with adjacent ones joined in one run.

    Args:
        heads: Address -> the first block of each segment.
    """
    for _, head in sorted(heads.items()):
        for is_gap, run in itertools.groupby(chain_of(head), lambda block: block.state == UNMAPPED):
            if not is_gap:
                yield list(run)


def cut(block: Block, size: int, state: int) -> Block:
    """Shorten a block to ``size`` bytes. Return the cut-off block of the pool, with a state."""
    rest = Block(block.address + size, block.size - size, block.pool, state)
    rest.previous, rest.next = block, block.next
    if block.next is not None:
        block.next.previous = rest
    block.next = rest
    block.size = size
    if state == FREE:
        block.pool.put(rest)
    return rest


def joined(first: Block, second: Block) -> Block:
    """Join two neighbours into ``first``, so a segment's first block stays the same object."""
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
    return first
