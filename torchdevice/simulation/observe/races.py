"""Finds accesses to the same memory on different streams that nothing orders.

Two accesses of which one writes are a race if the later one's stream does not know of the earlier
one (``happens_before.py``). ``torch.cuda._sanitizer`` does that too; here accesses have ranges of
bytes, so that streams may work on parts of one tensor, and memory that is freed and given out again
is followed.

Limits: a view with gaps counts from its first to its last byte. Backward counts as ordered after
all earlier work, its nodes one after the other, and what they use as kept by ``record_stream``.
Accesses of the host to its own memory are not seen.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from torchdevice.errors import Access, GraphRaceError, RaceError, RaceWarning
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_memory import Block
from torchdevice.kernel.devices.stream_order import COLLECTIVES, Stream
from torchdevice.kernel.journal.callers import program_line, site_of, warn_at
from torchdevice.kernel.stand_ins import extent
from torchdevice.simulation.kernels.cpu_kernels import index_of
from torchdevice.simulation.observe.happens_before import Clock, Order, knows

_LARGE = 1 << 20
"""``kSmallSize`` of CUDA's caching allocator, in bytes: larger blocks belong to another pool."""


class Accesses:
    """Accesses to one block of memory, by their bytes.

    An access to at least 2^(n-1) and fewer than 2^n bytes is in level ``n``, in the cell of 2^n
    bytes in which it begins. So those that overlap a range are in the cells of the range and in the
    one before it.
    """

    def __init__(self) -> None:
        self._levels: dict[int, dict[int, list[Access]]] = {}

    def cell(self, access: Access) -> list[Access]:
        """Return the list for an access."""
        level = (access.end - access.start).bit_length()
        return self._levels.setdefault(level, {}).setdefault(access.start >> level, [])

    def between(self, start: int, end: int) -> list[Access]:
        """Return the accesses to bytes of a range, in the order of their kernels."""
        found = []
        for level, cells in self._levels.items():
            near = range((start >> level) - 1, (end - 1 >> level) + 1)
            for cell in near if len(near) < len(cells) else cells:
                found += [
                    each for each in cells.get(cell, ()) if each.start < end and start < each.end
                ]
        return sorted(found, key=lambda each: (each.number, not each.writes))


class _Memory:
    """A block of memory, the stream it was allocated for, and accesses a later one may race with.

    Attributes:
        pool: The memory pool of the graph whose capture allocated it; None for other memory.
        replays: How often that graph was replayed since a kernel read the memory.
    """

    pool: Any = None
    replays = 0

    def __init__(self, stream: Stream, block: Block):
        self.stream = stream
        self.size = block.size
        self.place = block.place or 0
        self.accesses = Accesses()
        # Those that nothing orders before the block is given out again.
        self.left: list[Access] = []
        self.used_by: set[Stream] = set()


class Races(Order):
    """Follows the kernels, streams and blocks of memory of one context.

    Args:
        context: The context, whose option ``races`` is ``"error"`` or ``"warn"``.
    """

    def __init__(self, context: Context):
        super().__init__(context)
        self._raises = context.options.races == "error"
        self._memory: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []
        self._told: set[tuple[Any, ...]] = set()
        # Of each graph: its inputs by their addresses, and what it allocated.
        self._graphs: dict[int, tuple[dict[int, _Memory], list[_Memory]]] = {}
        # In each pool by replays, in their order.
        self._written: dict[Any, dict[_Memory, None]] = {}
        # The graph that was last replayed in each pool.
        self._pools: dict[Any, tuple[int, Access]] = {}

    # ---- memory ----------------------------------------------------------------------------------

    def allocated(self, block: Block) -> None:
        """Note a new block. It may be one that a stream has not finished with."""
        with self.lock:
            stream = self.current(block.device)
            # The allocator would give this block again, so a stream may still be at work in it.
            again = next((old for old in self._freed if _fits(old, stream, block.size)), None)
            if again is not None:
                self._freed.remove(again)
                clock = self.clock(stream)
                for earlier in again.left:
                    if not _knows(clock, earlier):
                        now = self._access("an allocation", stream, True, 0, block.size)
                        remedy = (
                            f"Call record_stream({_spelled(earlier.stream)}) before the tensor is "
                            "freed."
                        )
                        self._report(earlier, now, remedy)
            memory = self._memory[block.address] = _Memory(stream, block)
            if self.context.thread.capture is not None:
                self.context.thread.capture.memory.append(memory)

    def freed(self, address: int) -> None:
        """Note that a block is free. The garbage collector may call this between any two lines."""
        with self.lock:
            memory = self._memory.pop(address, None)
            if memory is None:
                return
            # Work that the memory's own stream has waited for needs no `record_stream`.
            clock, accesses = self.clock(memory.stream), memory.accesses.between(0, memory.size)
            memory.left = [
                each
                for each in accesses
                if each.stream not in memory.used_by and not _knows(clock, each)
            ]
            if memory.left:
                self._freed.append(memory)
                # The oldest ones go, so that a long program does not grow.
                del self._freed[:-_KEPT]

    def memory_used(self, tensor: Any, stream: Stream) -> None:
        with self.lock, torch._C.DisableTorchFunction():
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                memory.used_by.add(stream)

    # ---- kernels ---------------------------------------------------------------------------------

    def ran(
        self, op: Any, args: Any, kwargs: Any, result: Any, used: list[tuple[torch.Tensor, bool]]
    ) -> None:
        """Check that a kernel's reads and writes are ordered after earlier accesses.

        Raises:
            RaceError: It is not, and the option says ``"error"``.
        """
        self._look_for_kept_results(op, args)
        # Writes first: a kernel that reads and writes a tensor does not race with itself.
        for tensor, writes in sorted(used, key=lambda each: not each[1]):
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                stream = self.current(index_of(tensor))
                # Torch's engine calls record_stream for gradients.
                if self.context.thread.streams.follows_nodes:
                    memory.used_by.add(stream)
                memory.replays *= writes
                name = op._schema.name.removeprefix("aten::")
                self._note(memory, self._access(name, stream, writes, *_extent(tensor)))

    def collective_used(self, name: str, tensor: Any, writes: bool) -> None:
        """Check that a collective's reads or writes are ordered after earlier accesses.

        Raises:
            RaceError: It is not, and the option says ``"error"``.
        """
        with self.lock, torch._C.DisableTorchFunction():
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                stream = self.begin_collective(index_of(tensor))
                self._note(memory, self._access(name, stream, writes, *_extent(tensor)))

    def _access(self, name: str, stream: Stream, writes: bool, start: int, end: int) -> Access:
        return Access(name, site_of(program_line()), stream, writes, self.number, start, end)

    def _note(self, memory: _Memory, access: Access) -> None:
        """Report accesses that race with a new one, which replaces those that it hides."""
        clock, gone = self.clock(access.stream), []
        for earlier in memory.accesses.between(access.start, access.end):
            known = _knows(clock, earlier)
            # Two reads never race.
            if not known and (earlier.writes or access.writes):
                self._report(earlier, access, _wait_for(earlier.stream, access.stream))
            # An access that covers an earlier one stands for it: whatever races with the earlier
            # also races with this.
            hidden = (
                access.start <= earlier.start
                and earlier.end <= access.end
                and (known or access.writes)
            )
            # Work that the host has waited for precedes all that follows.
            if (hidden and (access.writes or not earlier.writes)) or _knows(self.host, earlier):
                gone.append(earlier)
        for earlier in gone:
            memory.accesses.cell(earlier).remove(earlier)
        memory.accesses.cell(access).append(access)

    def _report(self, earlier: Access, later: Access, remedy: str) -> None:
        streams = _spelled(earlier.stream), _spelled(later.stream)
        line = earlier.site, earlier.name, later.site, later.name
        self._tell(RaceError(earlier, later, *streams, remedy), line)

    def _tell(self, error: RaceError, line: tuple[Any, ...]) -> None:
        if self._raises:
            try:
                raise error
            finally:
                del error  # or its traceback would hold this frame, and this frame the error
        # Once for each pair of lines: a loop would warn at each turn.
        if line not in self._told:
            self._told.add(line)
            warn_at(program_line(), RaceWarning(str(error)), RaceWarning)

    # ---- graphs ----------------------------------------------------------------------------------

    def graph_captured(self, graph: int, pool: Any, capture: Any) -> None:
        with self.lock:
            # On CUDA nothing was computed that later work would have to wait for.
            for stream in capture.order.clocks:
                self.stream_synchronized(stream)
            inputs = {each: self._memory[each] for each in capture.inputs() if each in self._memory}
            self._graphs[graph] = inputs, capture.memory
            for memory in capture.memory:
                memory.pool = pool

    def graph_replayed(self, graph: int, pool: Any, index: int) -> None:
        """Check that a graph's memory is its own: its inputs live, and no graph of its pool runs.

        Raises:
            RaceError: It is not, and the option says ``"error"``.
        """
        with self.lock:
            written = self._written.setdefault(pool, {})
            inputs, made = self._graphs.get(graph, ({}, []))
            for address, memory in inputs.items():
                is_own = memory.pool == pool and _is_last(memory, written)
                if self._memory.get(address) is not memory and not is_own:
                    site = site_of(program_line())
                    self._tell(GraphRaceError(_LOST.format(site)), (site,))
            for memory in made:
                written[memory] = written.pop(memory, None)  # it becomes the last one
                memory.replays += 1
            now = self._access("the graph", self.current(index), True, 0, 1)
            other, earlier = self._pools.get(pool, (graph, now))
            self._pools[pool] = graph, now
            if other != graph and not _knows(self.clock(now.stream), earlier):
                self._report(earlier, now, _wait_for(earlier.stream, now.stream))

    def _look_for_kept_results(self, op: Any, args: Any) -> None:
        """Report a list with a graph's result kept over replays, which overwrote it."""
        # No graph was replayed, or no list given.
        if not (self._pools and args and isinstance(args[0], (list, tuple))):
            return
        of_device = [
            each for each in args[0] if isinstance(each, torch.Tensor) and index_of(each) >= 0
        ]
        places = Counter((each.untyped_storage().data_ptr(), *_extent(each)) for each in of_device)
        for (address, *_), times in places.items():
            memory = self._memory.get(address)
            # A correct program reads a result after each replay, and repeats it at will.
            if memory is not None and 1 < times <= memory.replays:
                name, site = op._schema.name.removeprefix("aten::"), site_of(program_line())
                self._tell(
                    GraphRaceError(_KEPT_RESULT.format(name, site, times, memory.replays)), (site,)
                )


def _is_last(memory: _Memory, written: dict[_Memory, None]) -> bool:
    """Return whether no replay has written to a block since the graph that allocated it."""
    first, last = memory.place, memory.place + memory.size
    near = (
        each for each in reversed(written) if each.place < last and first < each.place + each.size
    )
    return next(near, memory) is memory


_LOST = (
    "the graph that is replayed at {} uses memory that was freed after its capture. Keep the "
    "tensors that the capture has used, and copy new values into them by copy_()."
)

_KEPT_RESULT = (
    "{} at {} is given one result of a graph {} times. The graph was replayed {} times since the "
    "result was last read, and each replay has overwritten it. Keep a copy of the result of each "
    "replay: clone()."
)

_KEPT = 1000
"""How many freed blocks are remembered."""


def _knows(clock: Clock, access: Access) -> bool:
    return knows(clock, access.stream, access.number)


def _fits(freed: _Memory, stream: Stream, size: int) -> bool:
    """Return whether CUDA's allocator may reuse a freed block for ``size`` bytes on a stream."""
    return (
        freed.stream == stream and freed.size >= size and (freed.size > _LARGE) == (size > _LARGE)
    )


def _spelled(stream: Stream) -> str:
    index, number = stream
    if number == COLLECTIVES:
        return f"NCCL's stream of cuda:{index}"
    if not number:
        return f"the default stream of cuda:{index}"
    return f"stream {number} of cuda:{index}"


def _wait_for(earlier: Stream, later: Stream) -> str:
    if earlier[1] == COLLECTIVES:
        return "Before the later line, call wait() of the work that the collective returned."
    if later[1] == COLLECTIVES:
        return (
            f"Call the collective on a stream that has waited for {_spelled(earlier)}, by its "
            "wait_stream()."
        )
    return (
        f"Before the later line, let {_spelled(later)} wait: call its wait_stream() with "
        f"{_spelled(earlier)}, or its wait_event() with an event that was recorded there after the "
        "earlier line."
    )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its block, and the byte after its last."""
    start = tensor.storage_offset() * tensor.itemsize
    return int(start), int(start + extent(tensor) * tensor.itemsize)
