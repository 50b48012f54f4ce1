"""Streams that sleep: ``torch.cuda._sleep`` on a device whose kernels are done when their call returns.

CUDA's kernel that sleeps lets the host go on. Here the stream has a time until which it is busy: events that are
recorded in it, and streams that wait for these, are not done before that time, and whoever waits for them waits until
then. Other kernels do their work at once, also on a stream that is busy.
"""

from __future__ import annotations

import time

from torchdevice.core.context import Context
from torchdevice.devices.stream_order import Stream, StreamObserver

CYCLES_PER_SECOND = 1e9


class Sleeping(StreamObserver):
    """The times until which the streams of one context are busy, in seconds of ``time.perf_counter()``."""

    def __init__(self) -> None:
        self._until: dict[Stream, float] = {}
        self._events: dict[int, float] = {}

    def sleep(self, stream: Stream, seconds: float) -> None:
        """Let a stream be busy for some time after what it is busy with."""
        self._until[stream] = max(time.perf_counter(), self.busy_until(stream)) + seconds

    def busy_until(self, stream: Stream) -> float:
        """Return the time at which a stream's work is done; 0 if it is."""
        return self._until.get(stream, 0.0)

    def event_recorded(self, event: int, stream: Stream) -> None:
        self._events[event] = self.busy_until(stream)

    def event_deleted(self, event: int) -> None:
        self._events.pop(event, None)

    def event_waited(self, event: int, stream: Stream) -> None:
        self._until[stream] = max(self.busy_until(stream), self._events.get(event, 0.0))

    def event_synchronized(self, event: int) -> None:
        wait_until(self._events.get(event, 0.0))

    def stream_synchronized(self, stream: Stream) -> None:
        wait_until(self.busy_until(stream))

    def device_synchronized(self, index: int) -> None:
        for stream, until in list(self._until.items()):
            if stream[0] == index:
                wait_until(until)


def wait_until(moment: float) -> None:
    """Wait until a time of ``time.perf_counter()``."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def busy_until(context: Context, stream: Stream) -> float:
    """Return the time, of ``time.perf_counter()``, at which a stream's work is done; 0 if it is."""
    found = context.settings.get(Sleeping)
    return found.busy_until(stream) if found is not None else 0.0


def sleep(context: Context, cycles: int) -> None:
    """Let the current stream be busy for the time that a 1 GHz clock takes for that many cycles."""
    found = context.settings.get(Sleeping)
    if found is None:
        found = context.settings[Sleeping] = Sleeping()
        context.stream_observers.append(found)
    context.runtime.watch_host_waits(context)
    index = context.thread.device_index
    found.sleep((index, context.thread.streams.get(index, 0)), cycles / CYCLES_PER_SECOND)
