"""CUDA's caching allocator as a model: the blocks and segments that the tensors of a device would have on a GPU.

A request gets the smallest free block of its stream's pool that is large enough, of which the rest is split off, else a
block of a new segment. A free block is merged with its free neighbours. Segments stay reserved until the cache is
emptied or memory runs out. The addresses are the model's own: the values of a tensor lie elsewhere.

Source: torch's notes on CUDA's memory management, and the comments of c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from torchdevice.devices.allocation_events import Part, Segment
from torchdevice.devices.runtime import Memory
from torchdevice.simulation import expandable_segments, pool_checkpoints
from torchdevice.simulation.allocator_settings import DEFAULT, MINIMUM, SMALL, Settings
from torchdevice.simulation.memory_blocks import (
    FREE,
    NOBODY,
    PENDING,
    SHIFT,
    UNCACHED,
    USED,
    Block,
    Owner,
    Pool,
    cut,
    joined,
    runs_of,
)
from torchdevice.simulation.memory_figures import Figures, shown
from torchdevice.simulation.pool_checkpoints import Checkpoint

_FIRST_ADDRESS, _ADDRESSES = 1 << 51, 1 << 45
"""The addresses of device 0 begin at the first number, and each device has as many as the second. No process has memory
there, so that the address of a tensor without values is never that of another.
"""


_EXBIBYTE = 1 << 60
"""CUDA's allocator refuses requests of so many bytes before it looks for memory."""


class Private:
    """A pool of the program's own, as ``torch.cuda.MemPool`` makes it.

    Attributes:
        uses: How many objects and routes keep it.
        serves_all: Whether it serves other allocations when memory runs out.
        splits: Whether its segments are split.
    """

    def __init__(self, serves_all: bool, splits: bool):
        self.uses = 0
        self.serves_all = serves_all
        self.splits = splits


class Limits(NamedTuple):
    """What limits a device.

    Attributes:
        total: Its memory in bytes, or None for no limit.
        allowed: The bytes that the program allows itself, or None for no such limit.
    """

    total: int | None = None
    allowed: int | None = None


_NUMBERS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


def _tell_nobody(action: str, address: int, size: int, stream: int) -> None:
    """Ignore a change of a segment."""


M = TypeVar("M", bound=Callable[..., Any])


def _changing(method: M) -> M:
    """Let a method of a device hold the lock, and lay the memory out anew if an interrupt ends the method.

    A generator that held the lock, as a context manager, would keep it where an interrupt comes between its two halves.
    """

    @functools.wraps(method)
    def changing(self: Device, *args: Any, **kwargs: Any) -> Any:
        try:
            self._release_ended()
            # On one line: tests let interrupts come between lines, where Python lets none come between these.
            with self._lock: return method(self, *args, **kwargs)  # noqa: E701  # fmt: skip
        except BaseException as error:
            self._recover_from(error)
            raise

    return changing  # type: ignore[return-value]


class Device:
    """The memory of one simulated device.

    Storages may end, by the garbage collector, between any two lines of this class. One that ends is therefore only
    appended to ``ended``, by a function in C, which no interrupt can come into. The next allocation or query releases
    it, and frees its block.

    Args:
        index: The index of the device.
        limits: Returns what limits the device; asked where a new segment is needed.
        error: Returns the error where memory runs out, given the bytes that were wanted, those in use, those of the
            device and those that the program may use; None for CUDA's.

    Attributes:
        ended: What has ended, in this order. Its ``release`` appends its block to ``freed``.
        freed: The blocks that nobody has any more, in this order.
        routes: For each private pool that allocations go to: its id, and whether it takes those of this thread.
        settings: The settings of the allocator.
        heads: Address -> the first block of each segment.
        tell: Called with each change of a segment: what happened, address, size and stream.
        live: Returns the blocks that somebody has.
        uncached: The bytes that tensors have from the driver directly.
    """

    def __init__(
        self,
        index: int,
        limits: Callable[[int], tuple[int | None, int | None]] = lambda index: (None, None),
        error: Callable[[int, int, int, int], Exception | None] = lambda *bytes_: None,
    ) -> None:
        self.index = index
        self.ended: deque[Any] = deque()
        self.freed: deque[Block] = deque()
        self.routes: list[tuple[Owner, Callable[[], bool]]] = []
        self.tell: Callable[[str, int, int, int], None] = _tell_nobody
        self.live: Callable[[], Collection[Block]] = tuple
        self._limits = limits
        self._error = error
        self._privates: dict[Owner, Private] = {}
        self._pools: dict[tuple[int, bool, Owner, bool], Pool] = {}
        self._usual: tuple[dict[int, Pool], dict[int, Pool]] = ({}, {})
        self.heads: dict[int, Block] = {}
        self._pending: list[Block] = []
        self._all = Figures()
        self._figures = {True: Figures(self._all), False: Figures(self._all)}
        self._oversize = {"oversize_allocations": Figures(), "oversize_segments": Figures()}
        self._numbers = dict.fromkeys(_NUMBERS, 0)
        self._searches = 0
        self._refused: Exception | None = None
        self.uncached = 0
        self._end = self._first = _FIRST_ADDRESS + index * _ADDRESSES
        self.configure(DEFAULT)
        self.renew_lock()

    def renew_lock(self) -> None:
        """Make a new lock."""
        self._lock = threading.RLock()

    def begin_in_child(self) -> None:
        """Begin again in a forked child: another thread may have been in the middle of a change, which nobody ends."""
        is_whole = self._lock.acquire(blocking=False)
        self.renew_lock()
        if not is_whole:
            self._recover()

    def configure(self, settings: Settings) -> None:
        """Use other settings from now on. Blocks and segments stay as they are."""
        self.settings = settings
        self._oversized = settings.max_split_size
        # Where every setting has its default, a request of the size of the block freed last is quickly answered.
        self._is_plain = settings == DEFAULT

    # ---- interrupts --------------------------------------------------------------------------------------------------

    def _refusal(self, error: Exception) -> Exception:
        """Return an error that is no interrupt: what it leaves is whole."""
        self._refused = error
        return error

    def _recover_from(self, error: BaseException) -> None:
        """Lay the memory out anew after an interrupt: any error but a refusal, as handlers of signals raise any."""
        if error is not self._refused:
            self._recover()
        self._refused = None

    def _recover(self) -> None:
        """Lay the memory out anew after an interrupt, which may have come between any two lines of a change.

        What is certain is which blocks storages have. Each becomes a segment of its own, and nothing is cached.
        """
        self._release_ended()
        with self._lock: self._lay_out_anew()  # noqa: E701  # fmt: skip

    def _lay_out_anew(self) -> None:
        used = set(self.live())
        outside = {block for block in used if block.pool.owner == UNCACHED}
        self.uncached = sum(block.size for block in outside)
        for _ in range(len(self.freed)):  # storages may end meanwhile, and append theirs
            block = self.freed.popleft()
            if block in used:
                self.freed.append(block)
        used -= outside
        self._pending = []
        for pool in self._pools.values():
            pool.clear()
        for block in used:
            pool = block.pool
            block.pool = self._pool_of(pool.stream, pool.is_small, pool.owner, False)
            block.previous = block.next = None
            block.state = USED
        self.heads = {block.address: block for block in used}
        for is_small, figures in self._figures.items():
            figures.count_anew([block for block in used if block.pool.is_small is is_small])
        self._all.count_anew(used)
        oversize = [block for block in used if self._oversized is not None and block.size >= self._oversized]
        for figures in self._oversize.values():
            figures.count_anew(oversize)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def allocate(self, requested: int, stream: int = 0) -> Block:
        """Return a block for a request of ``requested`` bytes on a stream.

        Raises:
            torch.OutOfMemoryError: The device has too little memory left. The text is CUDA's.
        """
        try:  # as ``_changing`` does it, without the time of its frame
            if self.ended:
                self._release_ended()
            with self._lock: return self._allocate(requested, stream)  # noqa: E701  # fmt: skip
        except BaseException as error:  # also after the block was found: nobody has it then
            self._recover_from(error)
            raise

    def _allocate(self, requested: int, stream: int) -> Block:
        freed = self.freed
        if freed:
            if len(freed) == 1 and freed[0].requested == requested and self._stays(freed[0], stream):
                block = freed.popleft()
                figures = block.pool.figures
                figures.total_allocated += block.size
                figures.total_requested += requested
                figures.total_count += 1
                return block
            self._settle()
        if not self.settings.caches:
            return self._from_driver((requested + MINIMUM - 1) & -MINIMUM, stream)
        size = (requested + MINIMUM - 1) & -MINIMUM if self._is_plain else self.settings.rounded(requested)
        pool = self._pool(size <= SMALL, stream)
        found = self._find(pool, size) or self._obtain(pool, size)
        return self._give(found, size, requested)

    def _from_driver(self, size: int, stream: int) -> Block:
        """Return a block that no statistics count, as ``cudaMalloc`` gives it to a disabled allocator.

        Raises:
            torch.AcceleratorError: The device has too little memory left. Cached segments are not released for it.
        """
        total = Limits(*self._limits(self.index)).total
        if total is not None and self._all.reserved + self.uncached + size > total:
            raise self._refusal(torch.AcceleratorError("CUDA error: out of memory"))
        key = (stream, False, UNCACHED, False)
        pool = self._pools.setdefault(key, Pool(*key, Figures()))
        self.uncached += size
        block = Block(self._end, size, pool, USED)
        self._end += size
        return block

    def _pool(self, is_small: bool, stream: int) -> Pool:
        for owner, takes in self.routes:
            if takes():
                return self._pool_of(stream, is_small, owner, False)
        found = self._usual[is_small].get(stream)
        if found is None:
            found = self._usual[is_small][stream] = self._pool_of(stream, is_small, NOBODY, False)
        return found

    def _pool_of(self, stream: int, is_small: bool, owner: Owner, expands: bool) -> Pool:
        key = (stream, is_small, owner, expands)
        found = self._pools.get(key)
        return found or self._pools.setdefault(key, Pool(stream, is_small, owner, expands, self._figures[is_small]))

    def _stays(self, block: Block, stream: int) -> bool:
        """Return whether a request of a freed block's size gets this block, and count what happens on the way.

        Nothing else changes then: the block would be freed, be found first, and have its rest split off again.
        """
        pool, size, previous, after = block.pool, block.size, block.previous, block.next
        if not pool.is_usual or pool.stream != stream or not self._is_plain or self.routes or block.uses:
            return False
        if block.state != USED:
            return False
        if previous is not None and previous.state == FREE:
            return False
        wanted = (block.requested + MINIMUM - 1) & -MINIMUM
        rest = after.size if after is not None and after.state == FREE else 0
        if rest and (size != wanted or not (pool.is_small or rest > SMALL)):
            return False
        keys, address = pool.keys, block.address
        at = bisect_left(keys, wanted << SHIFT)
        if at < len(keys):
            found = keys[at]
            if rest and found == rest << SHIFT | (address + size):  # the rest itself
                found = keys[at + 1] if at + 1 < len(keys) else found << SHIFT
            if found < (size + rest) << SHIFT | address:
                return False
        if previous is not None or (after is not None and (not rest or after.next is not None)):
            pool.figures.bounce(0 if rest else 1, size)
        elif rest:
            pool.figures.total_inactive_count += 1
            pool.figures.total_inactive += rest
        return True

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Take the free block that fits a request best out of its pool; None if none fits."""
        if self._is_plain:
            keys = pool.keys
            at = bisect_left(keys, size << SHIFT)
            return pool.blocks.pop(keys.pop(at)) if at < len(keys) else None
        self._searches += not pool.is_small and pool.owner == NOBODY
        found = self._fitting(pool, size)
        if found is not None:
            found.pool.take(found)
        return found

    def _fitting(self, pool: Pool, size: int) -> Block | None:
        found = pool.first(size)
        if self.settings.expandable_segments:
            expanded = expandable_segments.best(self._pool_of(pool.stream, pool.is_small, pool.owner, True), size)
            if found is None or (expanded is not None and expanded.key < found.key):
                found = expanded
        limit = self._oversized
        if found is None or limit is None:
            return found
        too_large = found.size >= (limit if size < limit else size + self.settings.max_non_split_rounding)
        return None if too_large else found

    def _give(self, block: Block, size: int, requested: int) -> Block:
        """Return a block that is in no pool, without what it has beyond ``size``, as one that a tensor has."""
        pool, rest, was_split = block.pool, block.size - size, block.is_split
        if rest and self._splits(pool, size, rest):
            cut(block, size, FREE)
            if not pool.expands:
                pool.figures.split(*((0, -size) if was_split else (1, rest)))
        elif was_split and not pool.expands:
            pool.figures.split(-1, -block.size)
        self.occupy(block, requested)
        return block

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.owner != NOBODY and not self._privates[pool.owner].splits:
            return False
        if pool.is_small or self.settings.expandable_segments:
            return rest >= MINIMUM
        return rest > SMALL and (self._oversized is None or size < self._oversized)

    def _release_ended(self) -> None:
        """Release what has ended. The lock is not held: observers have locks of their own."""
        ended = self.ended
        try:
            while ended:
                ended.popleft().release()
        except IndexError:  # another thread was faster
            return

    def release_ended(self) -> None:
        """Release what has ended, so that its memory is the CPU's again, also if no further allocation comes."""
        try:
            self._release_ended()
        except BaseException as error:
            self._recover_from(error)
            raise

    def _settle(self) -> None:
        """Free the blocks that nobody has any more."""
        while self.freed:
            block = self.freed.popleft()
            if block.state != USED:  # a checkpoint was restored, and the storage ended meanwhile
                continue
            if block.pool.owner == UNCACHED:
                self.uncached -= block.size
                block.state = FREE
                continue
            if self._oversized is not None and block.size >= self._oversized:
                self._oversize["oversize_allocations"].change("count", -1)
            if block.uses:
                block.state = PENDING
                block.pool.figures.suspend(block.size)
                self._pending.append(block)
            else:
                self._free(block)

    def _free(self, block: Block) -> None:
        """Put a block into its pool, with its free neighbours."""
        block.state = FREE  # also where its neighbour takes it in
        pool, count, inactive = block.pool, 0, 0
        pool.figures.remove(block.size, block.requested)
        after, previous = block.next, block.previous
        if after is not None and after.state == FREE:
            pool.take(after)
            count, inactive = -1, -after.size
            joined(block, after)
        if previous is not None and previous.state == FREE:
            pool.take(previous)
            count, inactive = count - 1, inactive - previous.size
            block = joined(previous, block)
        pool.put(block)
        if block.is_split:
            count, inactive = count + 1, inactive + block.size
        elif self.settings.garbage_collection_threshold:
            pool.ages[block.key] = self._searches
        if (count or inactive) and not pool.expands:
            pool.figures.split(count, inactive)

    def use(self, block: Block, stream: Any) -> None:
        """Note that another stream uses a block, which defers its reuse until the host has waited for the device."""
        if stream != (self.index, block.pool.stream):
            block.uses = (block.uses or set()) | {stream}

    @property
    def has_pending(self) -> bool:
        """Whether there may be blocks that another stream uses and that are freed."""
        return bool(self._pending or self.freed or self.ended)

    @_changing
    def host_waited(self) -> None:
        """Free the blocks that were freed while another stream used them: the host has waited for the device."""
        self._settle()
        pending, self._pending = self._pending, []
        for block in pending:
            block.uses = None
            block.pool.figures.resume(block.size)
            self._free(block)

    # ---- segments ----------------------------------------------------------------------------------------------------

    def _obtain(self, pool: Pool, size: int) -> Block:
        """Return a block of a new segment, for which the cache is emptied if that is necessary."""
        limits, wanted = Limits(*self._limits(self.index)), self.settings.segment_size(size)
        if limits.allowed is not None:
            self._collect_garbage(limits.allowed)
        found = self._new(pool, size, wanted, limits)
        if found is None and self._release_oversize(pool, size):
            found = self._new(pool, size, wanted, limits)
        if found is None:
            self._release_all()
            self._numbers["num_alloc_retries"] += 1
            found = self._new(pool, size, wanted, limits) or self._borrowed(pool, size)
        if found is None:
            self._numbers["num_ooms"] += 1
            total = limits.total or 0
            error = self._error(wanted, self._all.allocated, total, limits.allowed or total)
            raise self._refusal(error or torch.OutOfMemoryError(self._out_of_memory(wanted, limits)))
        return found

    def _new(self, pool: Pool, size: int, wanted: int, limits: Limits) -> Block | None:
        """Return a block of a new segment of ``wanted`` bytes, or of an expandable one; None without memory for it."""
        if limits.allowed is not None and self._all.reserved + wanted > limits.allowed:
            return None
        if self.settings.expandable_segments:
            within = self._pool_of(pool.stream, pool.is_small, pool.owner, True)
            unit = self.settings.unit(is_small=pool.is_small)
            return expandable_segments.expand(self, within, size, unit, limits.total)
        if not self.reserve(pool, wanted, limits.total):
            return None
        pool.figures.change("segments", 1)
        if self._oversized is not None and wanted >= self._oversized:
            self._oversize["oversize_segments"].change("count", 1)
        block = self.begin_segment(pool, wanted, USED)
        self.tell("segment_alloc", block.address, wanted, pool.stream)
        return block

    def begin_segment(self, pool: Pool, size: int, state: int, unit: int = 1) -> Block:
        """Return a block that is a whole segment at new addresses, which begin at a multiple of ``unit``."""
        if not self.heads and not self.uncached:
            self._end = self._first
        self._end = -(-self._end // unit) * unit
        block = self.heads[self._end] = Block(self._end, size, pool, state)
        self._end += size
        return block

    def reserve(self, pool: Pool, size: int, total: int | None) -> bool:
        """Count memory that a pool gets from the driver. Return whether the driver has as much."""
        if total is not None and self._all.reserved + self.uncached + size > total:
            return False
        self._numbers["num_device_alloc"] += 1
        pool.figures.change("reserved", size)
        return True

    def give_back(self, pool: Pool, size: int) -> None:
        """Count memory that a pool returns to the driver."""
        self._numbers["num_device_free"] += 1
        pool.figures.change("reserved", -size)

    def _borrowed(self, pool: Pool, size: int) -> Block | None:
        """Take a block of a private pool that serves other allocations when memory runs out."""
        for owner, private in self._privates.items():
            if private.serves_all:
                found = self._find(self._pool_of(pool.stream, pool.is_small, owner, False), size)
                if found is not None:
                    return found
        return None

    def _release(self, block: Block) -> None:
        """Return a free block that is a whole segment to the driver."""
        pool = block.pool
        pool.take(block)
        pool.ages.pop(block.key, None)
        self.give_back(pool, block.size)
        pool.figures.change("segments", -1)
        if self._oversized is not None and block.size >= self._oversized:
            self._oversize["oversize_segments"].change("count", -1)
        del self.heads[block.address]
        self.tell("segment_free", block.address, block.size, pool.stream)

    def _release_pool(self, pool: Pool) -> None:
        for key in list(pool.keys):
            block = pool.blocks[key]
            if pool.expands:
                expandable_segments.unmap(self, block, self.settings.unit(is_small=pool.is_small))
            elif not block.is_split:
                self._release(block)

    def _release_all(self) -> None:
        """Wait for the device, and return the segments without a block in use to the driver."""
        self._numbers["num_sync_all_streams"] += 1
        self.host_waited()
        for pool in list(self._pools.values()):
            private = self._privates.get(pool.owner)
            if private is None or not private.uses:
                self._release_pool(pool)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release blocks that are too large to be split, enough for a request. Return whether there were enough."""
        limit = self._oversized
        if limit is None:
            return False
        wanted = max(size, limit)
        first = pool.first(wanted)
        if first is not None:
            self._release(first)
            return True
        released = 0
        for key in reversed(pool.keys):
            block = pool.blocks[key]
            if released >= wanted or block.size < limit:
                break
            released += block.size
            if not block.is_split:
                self._release(block)
        return released >= wanted

    def _collect_garbage(self, allowed: int) -> None:
        """Release large blocks that have been free for long, where reserved memory exceeds the threshold."""
        most = int(self.settings.garbage_collection_threshold * allowed)
        if not most or self._all.reserved <= most:
            return
        excess = self._all.reserved - most
        pools = [pool for pool in self._usual[False].values() if not pool.expands]
        left = {b: self._searches - p.ages.get(k, 0) for p in pools for k, b in p.blocks.items() if not b.is_split}
        while excess > 0 and left:
            mean = sum(left.values()) / len(left)
            for block in [block for block, age in left.items() if age >= mean]:
                excess -= block.size
                del left[block]
                self._release(block)

    @_changing
    def empty_cache(self) -> None:
        """Return the segments without a block in use to the driver."""
        self._release_all()

    # ---- private pools -----------------------------------------------------------------------------------------------

    @_changing
    def keep_private(self, owner: Owner, *, serves_all: bool = False, splits: bool = True) -> None:
        """Count one more use of a private pool, which is made if there is none of this id."""
        self._privates.setdefault(owner, Private(serves_all, splits)).uses += 1

    @_changing
    def release_private(self, owner: Owner) -> None:
        """Count one use of a private pool less. Its segments may be returned to the driver after the last."""
        private = self._privates.get(owner)
        if private is not None:
            private.uses -= 1

    def uses_of(self, owner: Owner) -> int:
        """Return how often a private pool is in use."""
        private = self._privates.get(owner)
        return private.uses if private is not None else 0

    @_changing
    def empty_private(self, owner: Owner) -> None:
        """Return the segments of a private pool without a block in use to the driver, if the pool is not in use."""
        self.host_waited()
        for pool in [each for each in self._pools.values() if each.owner == owner and not self.uses_of(owner)]:
            self._release_pool(pool)

    @_changing
    def route(self, owner: Owner, takes: Callable[[], bool]) -> None:
        """Let a private pool serve the allocations of a thread where ``takes()`` is true."""
        self.routes.append((owner, takes))

    @_changing
    def unroute(self, owner: Owner) -> None:
        """End the first route of a private pool."""
        found = next((each for each in self.routes if each[0] == owner), None)
        if found is not None:
            self.routes.remove(found)

    @_changing
    def checkpoint(self, owner: Owner, data: Mapping[Block, int]) -> Checkpoint:
        """Return which blocks of a private pool are in use. ``data`` has the addresses of their values.

        Raises:
            RuntimeError: The pool does not exist, or has ended. The texts are CUDA's.
        """
        self._check_private(owner)
        self.host_waited()
        return pool_checkpoints.taken(self, owner, data)

    @_changing
    def restore(self, checkpoint: Checkpoint) -> dict[Block, int]:
        """Free the blocks of a private pool, and use those that were in use at a checkpoint.

        Returns:
            The blocks in use, with the address of the values of each at the checkpoint.
        """
        self._check_private(checkpoint.owner)
        return pool_checkpoints.restored(self, checkpoint)

    @_changing
    def in_use(self, owner: Owner) -> list[Block]:
        """Return the blocks of a private pool that are in use."""
        self._check_private(owner)
        self._settle()
        return pool_checkpoints.in_use(self, owner)

    def _check_private(self, owner: Owner) -> None:
        if owner not in self._privates:
            raise self._refusal(RuntimeError("Could not find pool of id"))
        if not self.uses_of(owner):
            raise self._refusal(RuntimeError("Not expected to checkpoint freeable graph"))

    def occupy(self, block: Block, requested: int) -> None:
        """Use the whole of a block that is in no pool."""
        block.state = USED
        block.requested = requested
        size = block.size
        block.pool.figures.add(size, requested)
        if self._oversized is not None and size >= self._oversized:
            self._oversize["oversize_allocations"].change("count", 1)

    # ---- figures -----------------------------------------------------------------------------------------------------

    @_changing
    def figures(self) -> Memory:
        """Return the current values and the peaks, in bytes."""
        self._settle()
        whole = self._all
        return Memory(whole.allocated, whole.reserved, whole.peak_allocated, whole.peak_reserved)

    @_changing
    def statistics(self) -> dict[str, Any]:
        """Return all statistics, under the keys of ``torch.cuda.memory_stats``."""
        self._settle()
        return {
            **shown({"all": self._all, "small_pool": self._figures[True], "large_pool": self._figures[False]}),
            **{name: figures.stat("count") for name, figures in self._oversize.items()},
            **self._numbers,
            "max_split_size": -1 if self._oversized is None else self._oversized,
        }

    def reset_peak(self) -> None:
        """Reset the peaks to the current values."""
        self._for_each_figures(Figures.forget_peaks)

    def reset_accumulated(self) -> None:
        """Reset the sums of allocated and freed memory, and the numbers of calls of the driver, to 0."""
        self._for_each_figures(Figures.forget_totals)
        self._numbers = dict.fromkeys(_NUMBERS, 0)

    @_changing
    def _for_each_figures(self, change: Callable[[Figures], None]) -> None:
        self._settle()
        for figures in (self._all, *self._figures.values(), *self._oversize.values()):
            change(figures)

    @_changing
    def segments(self, data: Mapping[Block, int]) -> list[Segment]:
        """Return the segments by address. ``data`` has the addresses of the values of blocks in use."""
        self._settle()
        return [self._segment(run, data) for run in runs_of(self.heads)]

    def _segment(self, blocks: Sequence[Block], data: Mapping[Block, int]) -> Segment:
        pool = blocks[0].pool
        parts = [
            Part(each.address, each.size, each.requested, _STATES[each.state], data.get(each, 0)) for each in blocks
        ]
        return Segment(self.index, pool.stream, not pool.is_small, pool.expands, pool.owner, tuple(parts))

    def refusal(self, requested: int, total: int) -> str:
        """Count a request that this machine's memory cannot serve, and return the text of CUDA's error."""
        self._numbers["num_ooms"] += 1
        if requested >= _EXBIBYTE:
            return "CUDA out of memory. Tried to allocate more than 1EB memory."
        wanted = self.settings.segment_size(self.settings.rounded(requested))
        return self._out_of_memory(wanted, Limits(*self._limits(self.index))._replace(total=total))

    def _out_of_memory(self, wanted: int, limits: Limits) -> str:
        """Return the error text of CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp)."""
        whole, total = self._all, limits.total or 0
        free = max(0, total - whole.reserved - self.uncached)
        cached = sum(key >> SHIFT for pool in self._pools.values() if pool.owner != NOBODY for key in pool.keys)
        allowed = "" if limits.allowed is None else f"{written(limits.allowed)} allowed; "
        private = f"with {written(cached)} allocated in private pools (e.g., CUDA Graphs), " if cached else ""
        return (
            f"CUDA out of memory. Tried to allocate {written(wanted)}. GPU {self.index} has a total capacity of "
            f"{written(total)} of which {written(free)} is free. Including non-PyTorch "
            f"memory, this process has {written(whole.reserved)} memory in use. {allowed}Of the allocated memory "
            f"{written(whole.allocated + cached)} is allocated by PyTorch, {private}and "
            f"{written(whole.reserved - whole.allocated - cached)} is reserved by PyTorch but unallocated. If reserved "
            f"but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
            f"fragmentation.  See documentation for Memory Management  "
            f"(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


_STATES = {USED: "active_allocated", PENDING: "active_pending_free", FREE: "inactive"}


def written(size: int) -> str:
    """Return a size as CUDA's allocator writes it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
