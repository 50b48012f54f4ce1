"""The memory that the allocator of a device has from the driver: segments, each at an address of its own.

The addresses are the model's own: the values of a tensor lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchdevice.devices.device_memory import Part, Segment
from torchdevice.simulation.allocator.allocator_stats import Statistics
from torchdevice.simulation.allocator.memory_blocks import FREE, PENDING, USED, Block, Pool, runs_of

# 2^51 is beyond the user addresses of every platform; 2^45 bytes are 32 TiB.
_FIRST_ADDRESS, _ADDRESSES = 1 << 51, 1 << 45
"""The addresses of the first device begin at the first number, and each device has as many as the second. No process
has memory there, so that the address of a tensor without values is never that of another.
"""


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

    def __init__(self, index: int, number: int, statistics: Statistics, tell: Callable[[str, int, int, int], None]):
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
        """Return a block that is a whole segment at new addresses, which begin at a multiple of ``unit``."""
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
        """Return the segments by address. ``data`` has the addresses of the values of blocks in use."""
        return [self._shown(run, data) for run in runs_of(self.heads)]

    def _shown(self, blocks: Sequence[Block], data: Mapping[Block, int]) -> Segment:
        pool = blocks[0].pool
        parts = [
            Part(each.address, each.size, each.requested, _STATES[each.state], data.get(each, 0)) for each in blocks
        ]
        return Segment(self.index, pool.stream, not pool.is_small, pool.expands, pool.owner, tuple(parts))


_STATES = {USED: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}
