"""The calls that CUDA forbids in a graph's capture, in its words (runtime manual: stream
management).

A capture follows the streams that take part in it: the one on which it began, and each that has
waited for an event which was recorded in it. The host may not wait for such a stream or event, such
a stream may not wait for work outside the capture, and the first stream must have waited for all
others when the capture ends.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.devices.stream_order import Stream

NOT_PERMITTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"
CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"
ISOLATION = "dependency created on uncaptured work in another stream"
UNJOINED = "capturing stream has unjoined work"


def error(kind: str) -> torch.AcceleratorError:
    """Return CUDA's error with a text."""
    return torch.AcceleratorError(f"CUDA error: {kind}")


def current_capture() -> Any:
    """Return the capture that this thread has begun; None where there is none."""
    context = thread_state.state.context
    return None if context is None else context.thread.capture


_COPIED_WHILE_CAPTURING = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
    "pinned. Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)


_NOT_WHILE_CAPTURING = (
    "{attempt} during CUDA graph capture. If you need this call to be captured, please file an "
    "issue. Current cudaStreamCaptureStatus: cudaStreamCaptureStatusActive"
)


def not_while_capturing(attempt: str | None = None, *, pageable: bool = False) -> None:
    """Raise if this thread is capturing a graph.

    Args:
        attempt: The operation of a generator, with which torch's error begins
            (aten/src/ATen/cuda/CUDAGraphsUtils.cuh). None for what CUDA itself refuses, which
            spoils the capture.
        pageable: Whether memory of the host is copied that is not pinned, which torch itself
            refuses from 2.11 on.
    """
    capture = current_capture()
    if capture is None:
        return
    if attempt is not None:
        raise RuntimeError(_NOT_WHILE_CAPTURING.format(attempt=attempt))
    if pageable and _LOOKS_AT_COPIES:
        raise RuntimeError(_COPIED_WHILE_CAPTURING)
    capture.failed = True
    raise error(NOT_PERMITTED)


_LOOKS_AT_COPIES = torch.__version__ >= "2.11"


class CaptureOrder(Observer):
    """The streams and events of one capture, and the order of the work on them.

    Args:
        context: The context of the capture.
        capture: The capture, whose ``failed`` becomes True where CUDA would invalidate it.
        stream: The stream on which it begins.
        mode: ``"global"``, ``"thread_local"`` or ``"relaxed"``: whose calls are refused that may be
            unsafe, those of all threads, of the capturing thread, or none.

    Attributes:
        clocks: Each stream that takes part -> the last kernel of each that it knows to be done.
    """

    def __init__(self, context: Context, capture: Any, stream: Stream, mode: str):
        self._context = context
        # The capture holds its order, and tensors, which a circle would keep for a collection.
        self._capture = weakref.ref(capture)
        self._mode = mode
        self._first = stream
        self.clocks: dict[Stream, dict[Stream, int]] = {stream: {}}
        self._events: dict[int, dict[Stream, int]] = {}
        self._count = 0

    def captures(self) -> bool:
        """Return whether the current stream takes part, and count a kernel on it if so."""
        stream = self._context.thread.stream()
        clock = self.clocks.get(stream)
        if clock is not None:
            self._count += 1
            clock[stream] = self._count
        return clock is not None

    def check_end(self) -> None:
        """Raise if the capture ends on another stream, or while other streams are unjoined."""
        if self._context.thread.stream() != self._first:
            raise RuntimeError("Capture must end on the same stream it began on.")
        known = self.clocks[self._first]
        if any(
            known.get(stream, 0) < clock.get(stream, 0) for stream, clock in self.clocks.items()
        ):
            self._refuse(UNJOINED)

    def _refuse(self, kind: str) -> None:
        capture = self._capture()
        if capture is not None:  # else its graph is gone, and nothing can be replayed
            capture.failed = True
        raise error(kind)

    @property
    def _is_of_this_thread(self) -> bool:
        """Whether this thread captures."""
        capture = self._context.thread.capture
        return capture is not None and capture is self._capture()

    @property
    def is_unsafe_here(self) -> bool:
        """Whether calls of this thread are refused that might touch the captured work."""
        is_strict = self._mode != "relaxed"
        return self._mode == "global" or (self._is_of_this_thread and is_strict)

    def event_recorded(self, event: int, stream: Stream) -> None:
        if stream in self.clocks:
            self._events[event] = dict(self.clocks[stream])
        else:
            self._events.pop(event, None)

    def event_deleted(self, event: int) -> None:
        self._events.pop(event, None)

    def event_waited(self, event: int, stream: Stream) -> None:
        known = self._events.get(event)
        if known is not None:
            clock = self.clocks.setdefault(stream, {})
            clock.update({each: max(number, clock.get(each, 0)) for each, number in known.items()})
        elif stream in self.clocks:
            self._refuse(ISOLATION)

    def event_synchronized(self, event: int) -> None:
        if event in self._events:
            self._refuse(CAPTURED_EVENT)
        if self.is_unsafe_here:
            self._refuse(NOT_PERMITTED)

    event_queried = event_synchronized

    def stream_synchronized(self, stream: Stream) -> None:
        if stream in self.clocks or self.is_unsafe_here:
            self._refuse(NOT_PERMITTED)

    stream_queried = stream_synchronized

    def device_synchronized(self, index: int) -> None:
        if self.is_unsafe_here or self._is_of_this_thread:
            self._refuse(NOT_PERMITTED)
