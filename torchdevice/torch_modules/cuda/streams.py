"""Streams and events, for ``torch/cuda/streams.py``, ``torch.Stream`` and ``torch.Event``.

A target runs all work in the order of submission, so a stream is only an id, and waiting for a
stream does nothing. Each thread has a current stream for each device. Events record real points of
the target's work.

The C base classes of torch's streams and events cannot be instantiated without a driver, so their
``__new__`` returns a stand-in instead. A stand-in is a ``torch.Stream`` or ``torch.Event`` whose
``__class__`` is the CUDA class, so that ``isinstance`` holds for both.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import REPLACED, replaces, supplied_function
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import conventional_modules
from torchdevice.kernel.devices.device_strings import Spelling
from torchdevice.kernel.devices.runtime import Mark, device_of
from torchdevice.kernel.devices.stream_order import Stream
from torchdevice.kernel.lowlevel.lazy_initialization import DEVICE_TYPES
from torchdevice.kernel.patching import original_of, replaced_function, subclass_in_place_of
from torchdevice.kernel.stand_ins import refuse_to_pickle
from torchdevice.kernel.thread_values import ThreadValues
from torchdevice.torch_modules.cuda import device_queries, sleeping


@supplied_function("_cuda_getCurrentStream")
def get_current_stream(context: Context, device: int) -> tuple[int, int, int]:
    """Return the id of this thread's current stream on a device, the ordinal and the type."""
    stream_id = context.thread.streams.get(device)
    if stream_id is None:  # the program has not changed it, and the ordinal may be wrong
        _check(context, device)
    return stream_id or 0, device, DEVICE_TYPES[context.program]


@supplied_function("_cuda_getDefaultStream")
def get_default_stream(context: Context, device: int) -> tuple[int, int, int]:
    """Return id 0, the device's ordinal, and its type."""
    _check(context, device)
    return 0, device, DEVICE_TYPES[context.program]


@supplied_function("_cuda_getCurrentRawStream")
def get_current_raw_stream(context: Context, device: int) -> int:
    """Return 0 for the default stream; raise for another one, unless streams have handles."""
    stream_id, _, _ = get_current_stream(context, device)
    if context.runtime.supplied.has_handles:
        return handle_of((device, stream_id))
    if stream_id:
        thread_state.refuse(
            "torch._C._cuda_getCurrentRawStream", "There is no cudaStream_t. Use torch.cuda.Stream."
        )
    return 0


@supplied_function("_cuda_getStreamFromExternal")
def get_stream_from_external(context: Context, pointer: int, device: int) -> tuple[int, int, int]:
    """Return the default stream for 0, or the stream of a handle; raise for other pointers."""
    if pointer and context.runtime.supplied.has_handles and pointer in context.streams.handles:
        index, stream_id = context.streams.handles[pointer]
        return stream_id, index, DEVICE_TYPES[context.program]
    if pointer:
        module = getattr(torch, context.program)
        name = "ExternalStream" if hasattr(module, "ExternalStream") else "get_stream_from_external"
        remedy = f"There is no stream of torch at that address. Use {module.__name__}.Stream."
        thread_state.refuse(f"{module.__name__}.{name}", remedy)
    return get_default_stream(context, device)


def handle_of(stream: Stream) -> int:
    """Return the handle, not an address, of a simulated stream; 0 is the default, as in CUDA."""
    index, number = stream
    # In the upper half ordinals count from 1, so no handle of device 0 is a plain small number.
    return (index + 1) << 32 | number if number else 0


def _check(context: Context, device: int) -> None:
    if not context.devices.accepts(device):  # worded as in c10/cuda/CUDAStream.cpp
        raise RuntimeError(
            f"Device index value {device} is out of index range [0, {context.devices.count})"
        )


@supplied_function("_cuda_setStream")
def set_stream(context: Context, stream_id: int, device_index: int, device_type: int) -> None:
    """Make a stream current on its device, and make the device current, as CUDA does."""
    thread = context.thread
    thread.streams[device_index] = stream_id
    if device_index != thread.device_index:
        thread.select(device_index)


@supplied_function("_cuda_isCurrentStreamCapturing")
def is_current_stream_capturing(context: Context) -> bool:
    """Return whether this thread is capturing a graph."""
    return context.thread.capture is not None


_ids = itertools.count(1)  # 0 is the default stream of every device


_event_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class NoPointer:
    """Stands in for a ``cudaStream_t``, to be printed and compared; no address can be had of it.

    Args:
        number: The id of the stream.
        name: The attribute of torch's stream that it is the value of.
        pointer: The type that the attribute points to on the accelerator.
    """

    number: int
    name: str
    pointer: str

    def __index__(self) -> int:
        thread_state.refuse(self.name, f"There is no {self.pointer}. Use the stream's methods.")

    __int__ = __index__

    def __format__(self, specification: str) -> str:
        return format(self.number, specification)

    def __repr__(self) -> str:
        return repr(self.number)


class StreamStandIn(torch.Stream):
    """A stream of the program. All streams of a target run work in the order of submission."""

    __reduce_ex__ = refuse_to_pickle

    module: Any = torch.cuda
    torch_device_type = DEVICE_TYPES["cuda"]
    # Torch has four priorities; the lowest number is the highest.
    highest_priority, lowest_priority = -3, 0
    handle, pointer = "cuda_stream", "cudaStream_t"
    priority: int
    _context: Context

    def __new__(
        cls, context: Context, stream_id: int, device_index: int, priority: int = 0
    ) -> StreamStandIn:
        self = super().__new__(  # type: ignore[call-arg]
            cls, stream_id=stream_id, device_index=device_index, device_type=cls.torch_device_type
        )
        self.priority = priority
        self._context = context
        return self

    # `torch.cuda.Stream(...)` calls `__init__` with the arguments that `__new__` has used already.
    def __init__(self, *args: Any, **kwargs: Any):
        pass

    # `isinstance(stream, torch.cuda.Stream)` asks the type first and then `__class__`.
    __class__ = property(lambda self: self.module.Stream)  # type: ignore[assignment]

    @property
    def native_handle(self) -> Any:
        """The ``cudaStream_t``: 0 for the default stream, as in CUDA; else an object to compare.

        On a simulated device, a number that ``ExternalStream`` takes back and that is no address.
        """
        if self._context.runtime.supplied.has_handles:
            return handle_of(self._identity)
        if self.stream_id == 0:
            return 0
        return NoPointer(
            self.stream_id, f"{self.module.__name__}.Stream.{self.handle}", self.pointer
        )

    cuda_stream = native_handle  # under CUDA's name

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Return the accelerator's lowest and highest priority."""
        return cls.lowest_priority, cls.highest_priority

    _as_parameter_ = torch.cuda.Stream._as_parameter_  # which reads `cuda_stream`

    # torch's own, which call the methods below.
    wait_event, wait_stream = torch.cuda.Stream.wait_event, torch.cuda.Stream.wait_stream  # type: ignore[assignment]
    record_event = torch.cuda.Stream.record_event

    def is_capturing(self) -> bool:
        """Return whether this thread is capturing a graph."""
        return self._context.thread.capture is not None

    def query(self) -> bool:
        """Return whether the stream's work is done; all streams', except on simulated devices."""
        times = sleeping.times(self._context)
        is_busy = times is not None and times.busy_until(self._identity) > times.now()
        done = not is_busy and self._context.runtime.mark(self._target_index, timing=False).query()
        if done:
            self._context.observers.tell("stream_queried", self._identity)
        return done

    def synchronize(self) -> None:
        """Wait for the work of the stream's device."""
        self._context.runtime.synchronize(self._target_index)
        self._context.observers.tell("stream_synchronized", self._identity)

    @property
    def _identity(self) -> Stream:
        return self.device_index, self.stream_id

    @property
    def _target_index(self) -> int:
        return self._context.devices.target_index(self.device_index)

    def __enter__(self) -> StreamStandIn:
        self._context.thread.entered_streams.append(self.select(self._context.thread))
        return self

    def __exit__(self, *exc_info: object) -> None:
        _restore(*self._context.thread.entered_streams.pop())

    def select(self, thread: ThreadValues) -> tuple[ThreadValues, int, int, int]:
        """Make the stream and its device current, and return the earlier ones, to restore."""
        # The program may change the stream or the device within the block.
        index, outer_index = self.device_index, thread.device_index
        before = thread, outer_index, index, thread.streams.get(index, 0)
        thread.streams[index] = self.stream_id
        if index != outer_index:
            thread.select(index)
        return before

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, torch.Stream):
            return False
        return self._identity == (other.device_index, other.stream_id)

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"<{self.module.__name__}.Stream device={self.device} stream_id={self.stream_id}>"


def _restore(thread: ThreadValues, outer_index: int, index: int, stream_id: int) -> None:
    thread.streams[index] = stream_id
    if outer_index != thread.device_index:
        thread.select(outer_index)


class EventStandIn(torch.Event):
    """An event of the program: a point in the target's work."""

    __reduce_ex__ = refuse_to_pickle

    module: Any = torch.cuda
    handle, pointer = "cuda_event", "cudaEvent_t"
    _context: Context
    _timing: bool
    _number: int
    _mark: Mark | None = None
    _recorded_on: int | None = None
    _done_at = _late = 0.0  # seconds of perf_counter, and milliseconds

    def __new__(
        cls,
        context: Context,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> EventStandIn:
        # Without a driver torch makes no event of another device.
        self = super().__new__(cls, device="cpu")
        self._context = context
        self._timing = enable_timing
        self._number = next(_event_numbers)
        return self

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    __class__ = property(lambda self: self.module.Event)  # type: ignore[assignment]

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """The device that the event was recorded on, or None before it was recorded."""
        return None if self._recorded_on is None else device_of("cuda", self._recorded_on)

    @property
    def event_id(self) -> int:  # type: ignore[override]
        """A number that tells the event from others; 0 before it is recorded, as in CUDA."""
        return 0 if self._mark is None else self._number

    @property
    def cuda_event(self) -> int:
        """The ``cudaEvent_t``: 0 before the event is recorded, as in CUDA; afterwards it raises.

        On a simulated device, a number that is no address.
        """
        if self._mark is None:
            return 0
        if self._context.runtime.supplied.has_handles:
            return self._number
        name = f"{self.module.__name__}.Event.{self.handle}"
        thread_state.refuse(name, f"There is no {self.pointer}. Use the event's methods.")

    _as_parameter_ = torch.cuda.Event._as_parameter_  # which reads `cuda_event`

    def record(self, stream: Any = None) -> None:
        """Record a point in the stream, or in the current stream if None.

        Raises:
            RuntimeError: The event was recorded on another device before.
        """
        context = self._context
        on = index, _ = (
            context.thread.stream() if stream is None else (stream.device_index, stream.stream_id)
        )
        if self._recorded_on is not None and self._recorded_on != index:
            raise RuntimeError(
                f"Event device {self._recorded_on} does not match recording stream's device "
                f"{index}."
            )
        for observer in context.observers.order:
            if self._recorded_on is None:
                observer.event_created(self._number)
            observer.event_recorded(self._number, on)
        self._recorded_on = index
        self._mark = context.runtime.mark(
            index and context.devices.target_index(index), timing=self._timing
        )
        if (
            self._timing
            and context.runtime.supplied.has_handles
            and any(each.stream_id for each in context.streams.last.values())
        ):
            sleeping.begin(context)
        times = context.settings.get(sleeping.Sleeping)
        if times is not None:
            # In milliseconds, as `elapsed_time` counts.
            self._done_at, self._late = times.busy_until(on), times.late(on) * 1e3

    def wait(self, stream: Any = None) -> None:
        """Make later work of a stream wait for the event. With one order of work it is free."""
        if self._mark is not None:
            if stream is None:
                on = self._context.thread.stream()
            else:
                on = (stream.device_index, stream.stream_id)
            for observer in self._context.observers.order:
                observer.event_waited(self._number, on)

    def query(self) -> bool:
        """Return whether the work before the recorded point is done; True without a point."""
        if self._mark is None:
            return True
        times = sleeping.times(self._context)
        done = (times is None or times.now() >= self._done_at) and self._mark.query()
        if done:
            self._context.observers.tell("event_queried", self._number)
        return done

    def synchronize(self) -> None:
        """Wait for the work before the recorded point."""
        if self._mark is not None:
            self._mark.synchronize()
            self._context.observers.tell("event_synchronized", self._number)

    def __del__(self) -> None:
        if self._mark is not None:
            for observer in self._context.observers.order:
                observer.event_deleted(self._number)

    def elapsed_time(self, end_event: EventStandIn) -> float:  # type: ignore[override]
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            ValueError: An event has no timing, or was not recorded.
            RuntimeError: The work before an event is not done, or the events are of two devices.
        """
        if not self._timing or not end_event._timing:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._mark is None or end_event._mark is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self._recorded_on != end_event._recorded_on:
            # The error of cudaEventElapsedTime.
            raise torch.AcceleratorError("CUDA error: invalid resource handle")
        return self._mark.elapsed_time(end_event._mark) + end_event._late - self._late

    def ipc_handle(self) -> bytes:
        """Raise: an event has no handle that another process could open."""
        thread_state.refuse(
            "torch.cuda.Event.ipc_handle", "Share an event between threads, not processes."
        )

    def __repr__(self) -> str:
        return (
            f"<{self.module.__name__}.Event "
            f"{'recorded' if self._mark is not None else 'uninitialized'}>"
        )


def new_stream(
    context: Context,
    device: Any = None,
    priority: int = 0,
    made: type[StreamStandIn] = StreamStandIn,
    **kwargs: Any,
) -> StreamStandIn:
    """Return a stand-in for a new stream, or for the one that ``stream_id`` or ``stream_ptr`` is.

    Args:
        context: The active context.
        device: The device as the program wrote it; None means the current device.
        priority: The priority, clamped to the accelerator's range.
        made: The class of the stand-in.
        **kwargs: The other arguments of ``torch.cuda.Stream``.
    """
    context.driver.initialize()
    if "stream_id" in kwargs:
        stream_id = kwargs["stream_id"]
        index = kwargs.get("device_index", context.thread.device_index)
        # The cached stand-in, so that `current_stream() is current_stream()`.
        known = context.streams.last.get((made, stream_id, index))
        return known or _remembered(context, made(context, stream_id, index))
    if "stream_ptr" in kwargs:
        return _new_external_stream(context, None, made, device=device, **kwargs)
    ordinal_by_torch = original_of(made.module._utils._get_device_index)
    ordinal = device_queries.get_device_index(context, ordinal_by_torch, device, optional=True)
    index = context.devices.ordinal(Spelling("cuda", ordinal))
    # CUDA clamps a priority beyond its range, too.
    priority = max(made.highest_priority, min(made.lowest_priority, priority))
    stream = _remembered(context, made(context, next(_ids), index, priority))
    if context.runtime.supplied.has_handles:
        context.streams.handles[handle_of(stream._identity)] = stream._identity
    context.observers.tell("stream_created", stream._identity)
    return stream


def current_stream(context: Context, index: int) -> StreamStandIn:
    """Return the current stream of a device."""
    return new_stream(context, stream_id=context.thread.streams.get(index, 0), device_index=index)


def create_external(context: Context) -> int:
    """Return a new stream's handle on the current device, as ``cudaStreamCreate`` does."""
    stream = context.thread.device_index, next(_ids)
    context.streams.handles[handle_of(stream)] = stream
    return handle_of(stream)


def _remembered(context: Context, stream: StreamStandIn) -> StreamStandIn:
    """Cache a stream and return it: programs ask for the current stream all the time."""
    # All at once: which of them is asked for again is not known.
    if len(context.streams.last) >= _KNOWN_STREAMS:
        context.streams.last.clear()
    context.streams.last[type(stream), stream.stream_id, stream.device_index] = stream
    return stream


_KNOWN_STREAMS = 64


@replaces(torch.cuda.ExternalStream, "__new__")
def _new_external_stream(
    context: Context,
    original: Any,
    cls: type,
    stream_ptr: int = 0,
    device: Any = None,
    **kwargs: Any,
) -> StreamStandIn:
    index = torch.cuda._utils._get_device_index(device, optional=True)
    stream_id, device_index, _ = get_stream_from_external(context, stream_ptr, index)
    return StreamStandIn(context, stream_id, device_index)


def _generic(original: type, make: Callable[..., Any]) -> type:
    """Return a subclass of ``torch.Stream`` or ``Event`` made by ``make(context, device, ...)``.

    It does so where the device is None or the program's accelerator.
    """

    @functools.wraps(original.__new__)
    def new(cls: type, device: Any = None, **kwargs: Any) -> Any:
        context: Any = thread_state.state.context
        own = context is not None and context.names.family != "cuda" and "stream_id" not in kwargs
        # A device argument: None, an accelerator's spelling, or a device redirected to the target.
        rewritten = own and isinstance(device, torch.device) and context.devices.is_targets(device)
        if own and (device is None or rewritten or context.redirect(device) is not None):
            return make(context, device, **kwargs)
        return original.__new__(cls, *(() if device is None else (device,)), **kwargs)

    also = tuple(getattr(module, original.__name__) for module in conventional_modules())
    return subclass_in_place_of(original, new, also=also)


def replaces_classes(stream: type[StreamStandIn], event: type[EventStandIn]) -> None:
    """Let stand-ins be made by an accelerator's stream and event classes."""

    @replaces(stream.module.Stream, "__new__")
    def make_stream(
        context: Context, original: Any, cls: type, *args: Any, **kwargs: Any
    ) -> StreamStandIn:
        # `torch.cuda.current_stream` names its stream; programs call it all the time.
        known = context.streams.last.get(
            (stream, kwargs.get("stream_id", -1), kwargs.get("device_index", -1))
        )
        return known or new_stream(context, *args, made=stream, **kwargs)

    @replaces(stream.module.Event, "__new__")
    def make_event(
        context: Context, original: Any, cls: type, *args: Any, **kwargs: Any
    ) -> EventStandIn:
        return event(context, *args, **kwargs)

    @replaces(stream.module.StreamContext, "__init__")
    def init_context(context: Context, original: Any, self: Any, stream: Any) -> None:
        self.stream, self.idx = stream, context.thread.device_index
        self.src_prev_stream = self.dst_prev_stream = None

    @replaces(stream.module.StreamContext, "__enter__")
    def enter_context(context: Context, original: Any, self: Any) -> None:
        """Select the stream as torch does, without its questions, which are 20 frames of Python."""
        if type(self.stream) is not stream:
            return original(self)
        if context.driver.user != os.getpid():
            context.driver.initialize()  # raises after a fork
        self._torchdevice_before = self.stream.select(context.thread)

    @replaces(stream.module.StreamContext, "__exit__")
    def exit_context(context: Context, original: Any, self: Any, *raised: Any) -> None:
        before = vars(self).pop("_torchdevice_before", None)
        if before is None:
            original(self, *raised)
        else:
            _restore(*before)

    # Torch's class may lack it without a driver.
    REPLACED.append(
        replaced_function(
            stream.module.Stream,
            "priority_range",
            lambda *_: stream.priority_range(),
            may_be_absent=True,
        )
    )


replaces_classes(StreamStandIn, EventStandIn)
replaces(torch, "Stream", makes=True, by_value=True)(
    lambda original: _generic(original, new_stream)
)


@replaces(torch, "Event", makes=True, by_value=True)
def _generic_event(original: Any) -> Any:
    return _generic(original, lambda context, device, **named: EventStandIn(context, **named))
