"""The order of the kernels of one context: which work is known to be done before which.

Each stream has a clock: for every stream, the last of its kernels that is known to have finished
before the stream's next kernel begins. Events carry a clock from one stream to another, and the
host has a clock too: what it has waited for is done before anything that it submits afterwards.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.devices.sparse_parts import parts_of, plain_parts
from torchdevice.kernel.devices.stream_order import COLLECTIVES, Stream
from torchdevice.kernel.stand_ins import given_to, is_written, tensors
from torchdevice.simulation.kernels.cpu_kernels import index_of

Clock = dict[Stream, int]

COPIES = frozenset({"aten::copy_", "aten::_to_copy"})

_METADATA_ONLY = re.compile(r"aten::(new_\w+|\w+_like)")
"""Operators that read no element of their arguments."""

_WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of the operators whose result the host has to wait for: a shape or a number that depends on
values.
"""


_ALL = -2
"""The id that stands for all streams of a device, where the host has waited for the device."""


def merge(clock: Clock, other: Mapping[Stream, int]) -> None:
    """Merge another clock into a clock."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def knows(clock: Clock, stream: Stream, number: int) -> bool:
    """Return whether a kernel of a stream is known to be done."""
    return clock.get(stream, 0) >= number or clock.get((stream[0], _ALL), 0) >= number


class Order(Observer):
    """The clocks of a context's streams, events and host.

    Args:
        context: The context.
    """

    def __init__(self, context: Context):
        self.context = context
        # Reentrant: a collection may call `freed` or `event_deleted` anywhere under the lock.
        self.lock = threading.RLock()
        # One count for all streams: numbers only have to grow along each stream.
        self.number = 0
        self._clocks: dict[Stream, Clock] = {}
        self._events: dict[int, Clock] = {}
        self.host: Clock = {}
        self._informed: set[Stream] = set()  # the streams whose clocks include the host's

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a kernel, count it, and note whether the host has waited for it."""
        result = kernel(*args, **kwargs)
        with torch._C.DisableTorchFunction(), self.lock:
            used = list(touched(op, args, kwargs, result))
            indices = {index_of(tensor) for tensor, _ in used}
            if indices:
                self.submit(indices)
                self.ran(op, args, kwargs, result, used)
                if host_waits(self.context, op, args, kwargs, result):
                    for index in indices:
                        self.stream_synchronized(self.current(index))
        return result

    def ran(
        self, op: Any, args: Any, kwargs: Any, result: Any, used: list[tuple[torch.Tensor, bool]]
    ) -> None:
        """Called for each counted kernel, with the result of :func:`touched`."""

    def clock(self, stream: Stream) -> Clock:
        """Return a stream's clock, which includes the host's."""
        clock = self._clocks.setdefault(stream, {})
        if stream not in self._informed:
            merge(clock, self.host)
            self._informed.add(stream)
        return clock

    def current(self, index: int) -> Stream:
        """Return this thread's current stream on a device."""
        return index, self.context.thread.streams.get(index, 0)

    def submit(self, indices: set[int]) -> None:
        """Count a kernel on its devices' current streams, which then wait for each other."""
        # The clocks are objects, changed in place below.
        clocks = [self.clock(self.current(index)) for index in indices]
        for clock in clocks[1:]:
            merge(clocks[0], clock)
        for clock in clocks[1:]:
            merge(clock, clocks[0])
        self.number += 1
        for index in indices:
            for clock in clocks:
                clock[self.current(index)] = self.number

    def _host_learns(self, clock: Mapping[Stream, int]) -> None:
        merge(self.host, clock)
        self._informed.clear()
        self.host_learned()

    def host_learned(self) -> None:
        """Called after the host has waited for something."""

    def event_recorded(self, event: int, stream: Stream) -> None:
        with self.lock:
            # A copy: the event stands for this moment, while the stream goes on.
            self._events[event] = dict(self.clock(stream))

    def event_deleted(self, event: int) -> None:
        with self.lock:
            self._events.pop(event, None)

    def event_waited(self, event: int, stream: Stream) -> None:
        with self.lock:
            # An event that was never recorded orders nothing, as in CUDA.
            merge(self.clock(stream), self._events.get(event, {}))

    def event_synchronized(self, event: int) -> None:
        with self.lock:
            self._host_learns(self._events.get(event, {}))

    event_queried = event_synchronized

    def stream_synchronized(self, stream: Stream) -> None:
        with self.lock:
            self._host_learns(self.clock(stream))

    stream_queried = stream_synchronized

    def device_synchronized(self, index: int) -> None:
        with self.lock:
            # The host knows all that the streams do, so their clocks begin anew and stay short.
            for stream in [each for each in list(self._clocks) if each[0] == index]:
                merge(self.host, self._clocks[stream])
                del self._clocks[stream]
            for stream in [each for each in self.host if each[0] == index]:
                del self.host[stream]
            self._host_learns({(index, _ALL): self.number})

    def begin_collective(self, index: int) -> Stream:
        """Count a collective that follows the current stream's work. Return its own stream."""
        stream = index, COLLECTIVES
        clock = self.clock(stream)
        # A collective begins after the work so far of the calling stream.
        merge(clock, self.clock(self.current(index)))
        self.number += 1
        clock[stream] = self.number
        return stream

    def collectives_waited(self) -> None:
        with self.lock:
            for stream, clock in list(self._clocks.items()):
                if stream[1] == COLLECTIVES:
                    merge(self.clock(self.current(stream[0])), clock)

    def backward_began(self) -> None:
        with self.lock:
            for index in {stream[0] for stream in self._clocks}:
                clock = self.clock(self.current(index))
                # Torch orders backward after the forward on each stream.
                for other in list(self._clocks.values()):
                    merge(clock, other)


def touched(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield each of the device's tensors that a call reads or writes, and whether it writes."""
    schema = op._schema
    # `zeros_like(x)` reads the shape of `x` and none of its values.
    reads = not _METADATA_ONLY.fullmatch(schema.name)
    given = given_to(op, args, kwargs)
    seen = set()
    parts = set()
    for argument in schema.arguments:
        writes = is_written(argument)
        for tensor in _tensors(given.get(argument.name)):
            seen.add(id(tensor))
            for part in _with_memory(tensor):
                if part is not tensor:
                    parts.add(part.untyped_storage().data_ptr())
                if writes or reads:
                    yield part, writes
    for tensor in _tensors(result):
        if id(tensor) not in seen:
            for part in _with_memory(tensor):
                # Memory that a sparse tensor shares with an argument is not made by the call.
                if part is tensor or part.untyped_storage().data_ptr() not in parts:
                    yield part, True


def of_device(value: Any) -> Iterator[torch.Tensor]:
    """Yield the device's tensors with elements in values; of sparse ones indices and values."""
    for tensor in _tensors(value):
        yield from _with_memory(tensor)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in tensors(value) if index_of(each) >= 0)


def _with_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return (part for part in plain_parts(tensor) if part.numel())


def sparse_indices(value: Any) -> Iterator[torch.Tensor]:
    """Yield the indices of the sparse tensors of the device among some values."""
    # The last part is the values; all before are indices.
    for tensor in _tensors(value):
        if tensor.layout is not torch.strided:
            yield from parts_of(tensor)[:-1]


def _host_side(op: Any, args: tuple[Any, ...], result: Any) -> torch.Tensor | None:
    """Return the CPU tensor of a copy between the host and the device; None for other calls."""
    if op._schema.name not in COPIES:
        return None
    return next((each for each in tensors((*args, result)) if each.is_cpu), None)


def in_flight(
    context: Context, op: Any, args: Any, kwargs: Mapping[str, Any], result: Any
) -> torch.Tensor | None:
    """Return the CPU tensor, page-locked, of a copy that continues after its call; else None.

    torch allocates a page-locked destination for ``to("cpu", non_blocking=True)``. Copies of sparse
    and of quantized tensors count as done.
    """
    host = _host_side(op, args, result)
    if host is None or host.layout is not torch.strided or host.is_quantized:
        return None
    if not given_to(op, args, kwargs).get("non_blocking"):
        return None
    if (host is result and op._schema.name == "aten::_to_copy") or context.pinned.holds(host):
        return host
    return None


def host_waits(
    context: Context, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> bool:
    """Return whether a call returns only when its work is done, as CUDA's does."""
    if op._schema.name in COPIES:
        return (
            _host_side(op, args, result) is not None
            and in_flight(context, op, args, kwargs, result) is None
        )
    return bool(_WAITS.intersection(op.tags))


class HostWaits(Observer):
    """Tells stream observers how long kernels of a context took, and where the host waits.

    Args:
        context: The context.
    """

    def __init__(self, context: Context):
        self._context = context

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a kernel. If the host waits for its result, it waits for those devices' streams."""
        began = time.perf_counter()
        result = kernel(*args, **kwargs)
        took = time.perf_counter() - began
        with torch._C.DisableTorchFunction():
            waits = host_waits(self._context, op, args, kwargs, result)
            for index in {index_of(tensor) for tensor, _ in touched(op, args, kwargs, result)}:
                stream = index, self._context.thread.streams.get(index, 0)
                for observer in self._context.observers.order:
                    observer.kernel_ran(stream, took)
                    if waits:
                        observer.stream_synchronized(stream)
        return result


def watch_host_waits(context: Context) -> None:
    """Look at the kernels of a context from now on. May be called again."""
    if not any(isinstance(each, HostWaits) for each in context.observers.kernels):
        context.observers.add(HostWaits(context))
