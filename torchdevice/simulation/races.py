"""Finds accesses to the same memory on different streams that nothing orders.

Each stream has a clock: for every stream, the last of its kernels that is known to have finished before the stream's
next kernel begins. Events carry a clock from one stream to another, and the host has a clock too: what it has waited
for is done before anything that it submits afterwards. Two accesses of which one writes are a race if the later one's
stream does not know of the earlier one. ``torch.cuda._sanitizer`` does that too; here accesses have ranges of bytes,
so that streams may work on parts of one tensor, and memory that is freed and given out again is followed.

Limits: a view with gaps counts from its first to its last byte. Backward runs on the stream on which it is called, and
counts as ordered after all earlier work, as torch orders it after the forward. What the host reads and writes in its
own memory is not seen.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from torchdevice.call_sites import program_line, site_of, warn_at
from torchdevice.context import Context
from torchdevice.devices.allocations import Block
from torchdevice.devices.stream_order import Stream, StreamObserver
from torchdevice.errors import Access, RaceError, RaceWarning
from torchdevice.simulation.kernels import index_of

_LARGE = 1 << 20
"""``kSmallSize`` of CUDA's caching allocator, in bytes: larger blocks belong to another pool."""

_METADATA_ONLY = re.compile(r"aten::(new_\w+|\w+_like)")
"""Operators that look at no element of the tensors they are given."""

_WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of the operators whose result the host has to wait for: a shape or a number that depends on values."""

_COPIES = frozenset({"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize"})

Clock = dict[Stream, int]


def _merge(clock: Clock, other: Mapping[Stream, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class _Memory:
    """A block of memory, the stream for which it was allocated, and the accesses that a later one may race with."""

    def __init__(self, stream: Stream, size: int):
        self.stream = stream
        self.size = size
        self.accesses: list[Access] = []
        self.used_by: set[Stream] = set()


class Races(StreamObserver):
    """Follows the kernels, streams and blocks of memory of one context.

    Args:
        context: The context, whose option says what to do about a race.
    """

    def __init__(self, context: Context):
        self._context = context
        self._raises = context.options.races == "error"
        self._lock = threading.RLock()
        self._number = 0
        self._clocks: dict[Stream, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}
        self._memory: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []
        self._told: set[tuple[Any, ...]] = set()

    # ---- the order of work -------------------------------------------------------------------------------------------

    def _clock(self, stream: Stream) -> Clock:
        """Return a stream's clock, which knows what the host knows."""
        clock = self._clocks.setdefault(stream, {})
        _merge(clock, self._host)
        return clock

    def event_recorded(self, event: int, stream: Stream) -> None:
        with self._lock:
            self._events[event] = dict(self._clock(stream))

    def event_deleted(self, event: int) -> None:
        with self._lock:
            self._events.pop(event, None)

    def event_waited(self, event: int, stream: Stream) -> None:
        with self._lock:
            _merge(self._clock(stream), self._events.get(event, {}))

    def event_synchronized(self, event: int) -> None:
        with self._lock:
            _merge(self._host, self._events.get(event, {}))

    event_queried = event_synchronized

    def stream_synchronized(self, stream: Stream) -> None:
        with self._lock:
            _merge(self._host, self._clock(stream))

    stream_queried = stream_synchronized

    def device_synchronized(self, index: int) -> None:
        with self._lock:
            for stream in list(self._clocks):
                if stream[0] == index:
                    _merge(self._host, self._clock(stream))

    def backward_began(self) -> None:
        with self._lock:
            for index in {stream[0] for stream in self._clocks}:
                clock = self._clock(self._current(index))
                for other in list(self._clocks.values()):
                    _merge(clock, other)

    def _current(self, index: int) -> Stream:
        return index, self._context.thread.streams.get(index, 0)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def allocated(self, block: Block) -> None:
        """Note a new block. It may be one that a stream has not finished with."""
        with self._lock:
            stream = self._current(block.device)
            again = next((old for old in self._freed if _fits(old, stream, block.size)), None)
            if again is not None:
                self._freed.remove(again)
                self._look_at_freed(again, stream, block)
            self._memory[block.address] = _Memory(stream, block.size)

    def freed(self, address: int) -> None:
        """Note that a block is free. The garbage collector may call this between any two lines."""
        with self._lock:
            memory = self._memory.pop(address, None)
            if memory is None:
                return
            clock = self._clock(memory.stream)
            memory.accesses = [
                each for each in memory.accesses if each.stream not in memory.used_by and not _knows(clock, each)
            ]
            if memory.accesses:
                self._freed.append(memory)
                del self._freed[:-_KEPT]

    def memory_used(self, tensor: Any, stream: Stream) -> None:
        with self._lock, torch._C.DisableTorchFunction():
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                memory.used_by.add(stream)

    def _look_at_freed(self, memory: _Memory, stream: Stream, block: Block) -> None:
        """Report the use of a block that was freed and is given out again while another stream may still use it."""
        clock = self._clock(stream)
        for earlier in memory.accesses:
            if not _knows(clock, earlier):
                now = self._access("an allocation", stream, True, 0, block.size)
                self._report(
                    earlier, now, f"Call record_stream({_spelled(earlier.stream)}) before the tensor is freed."
                )

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def run(self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel, and look whether what it reads and writes is ordered after the accesses before.

        Raises:
            RaceError: It is not, and the option says ``"error"``.
        """
        name = op._schema.name
        result = kernel(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            touched = list(_touched(op, args, kwargs, result))
            if not touched:
                return result
            indices = {index_of(tensor) for tensor, _ in touched}
            with self._lock:
                self._submit(name, indices, touched)
                if _host_waits(self._context, op, args, kwargs, result):
                    for index in indices:
                        self.stream_synchronized(self._current(index))
        return result

    def _submit(self, name: str, indices: set[int], touched: list[tuple[torch.Tensor, bool]]) -> None:
        """Note a kernel on the current stream of each device that it works on. These streams wait for each other."""
        clocks = [self._clock(self._current(index)) for index in indices]
        for clock in clocks[1:]:
            _merge(clocks[0], clock)
        for clock in clocks[1:]:
            _merge(clock, clocks[0])
        self._number += 1
        for index in indices:
            for clock in clocks:
                clock[self._current(index)] = self._number
        for tensor, writes in sorted(touched, key=lambda each: not each[1]):
            stream = self._current(index_of(tensor))
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
            if memory is not None:
                start, end = _extent(tensor)
                self._note(memory, self._access(name.removeprefix("aten::"), stream, writes, start, end))

    def _access(self, name: str, stream: Stream, writes: bool, start: int, end: int) -> Access:
        return Access(name, site_of(program_line()), stream, writes, self._number, start, end)

    def _note(self, memory: _Memory, access: Access) -> None:
        """Look for accesses that race with a new one, and keep it in the place of those that it hides."""
        clock = self._clock(access.stream)
        kept = []
        for earlier in memory.accesses:
            overlaps = earlier.start < access.end and access.start < earlier.end
            known = _knows(clock, earlier)
            if overlaps and not known and (earlier.writes or access.writes):
                self._report(earlier, access, _wait_for(earlier.stream, access.stream))
            hidden = access.start <= earlier.start and earlier.end <= access.end and (known or access.writes)
            if not (hidden and (access.writes or not earlier.writes)):
                kept.append(earlier)
        memory.accesses = [*kept, access]

    def _report(self, earlier: Access, later: Access, remedy: str) -> None:
        line = (earlier.site, earlier.name, later.site, later.name)
        error = RaceError(earlier, later, _spelled(earlier.stream), _spelled(later.stream), remedy)
        if self._raises:
            raise error
        if line not in self._told:
            self._told.add(line)
            warn_at(program_line(), RaceWarning(str(error)), RaceWarning)


_KEPT = 1000
"""How many freed blocks are remembered."""


def _knows(clock: Clock, access: Access) -> bool:
    return clock.get(access.stream, 0) >= access.number


def _fits(freed: _Memory, stream: Stream, size: int) -> bool:
    """Return whether CUDA's allocator may give a freed block for a request of ``size`` bytes on a stream."""
    return freed.stream == stream and freed.size >= size and (freed.size > _LARGE) == (size > _LARGE)


def _spelled(stream: Stream) -> str:
    index, number = stream
    return f"the default stream of cuda:{index}" if not number else f"stream {number} of cuda:{index}"


def _wait_for(earlier: Stream, later: Stream) -> str:
    return (
        f"Before the later line, let {_spelled(later)} wait: call its wait_stream() with {_spelled(earlier)}, or its "
        f"wait_event() with an event that was recorded there after the earlier line."
    )


def _touched(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[tuple[Any, bool]]:
    """Yield each tensor of the device that a call reads or writes, and whether the call writes to it."""
    schema = op._schema
    reads = not _METADATA_ONLY.fullmatch(schema.name)
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False), **kwargs)
    seen = set()
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _of_device(given.get(argument.name)):
            seen.add(id(tensor))
            if writes or reads:
                yield tensor, writes
    for tensor in _of_device(result):
        if id(tensor) not in seen:
            yield tensor, True


def _of_device(value: Any) -> Iterator[torch.Tensor]:
    if value is None or isinstance(value, (int, float, str)):
        return
    for each in (value,) if isinstance(value, torch.Tensor) else tree_leaves(value):
        if isinstance(each, torch.Tensor) and each.layout is torch.strided and index_of(each) >= 0 and each.numel():
            yield each


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its block, and the byte after its last."""
    start = tensor.storage_offset() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start), int(start + (last + 1) * tensor.itemsize)


def _host_waits(context: Context, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Return whether a call returns only when its work is done, as CUDA's does."""
    if op._schema.name not in _COPIES:
        return bool(_WAITS.intersection(op.tags))
    tensors = [each for each in (*args, result) if isinstance(each, torch.Tensor)]
    on_host = [each for each in tensors if index_of(each) < 0]
    return bool(on_host) and not is_in_flight(context, op, args, kwargs, result, on_host[0])


def is_in_flight(context: Context, op: Any, args: Any, kwargs: Mapping[str, Any], result: Any, host: Any) -> bool:
    """Return whether a copy between the host and the device goes on after its call: of page-locked memory only.

    torch allocates a page-locked destination for ``to("cpu", non_blocking=True)``.
    """
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False), **kwargs)
    if not given.get("non_blocking"):
        return False
    makes_it = op._schema.name == "aten::_to_copy" and host is result
    return makes_it or context.is_pinned(host)
