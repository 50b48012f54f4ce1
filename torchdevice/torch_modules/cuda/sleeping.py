"""The times of streams on a device whose kernels are done when their call returns.

On CUDA the host goes on while kernels run. Here a stream has a time until which it is busy: it
sleeps so long, or a kernel took so long, after the stream's earlier work. Events that are recorded
in it, and streams that wait for these, are not done before that time. The host's clock stands still
while a kernel computes, so that kernels of two streams lie beside each other; waiting for them ends
with the later one.
"""

from __future__ import annotations

import time

from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.devices.stream_order import Stream

CYCLES_PER_SECOND = 1e9


class Sleeping(Observer):
    """When the streams of a context end their sleep: seconds of the host's clock, :meth:`now`."""

    def __init__(self) -> None:
        self._hidden = 0.0  # for how long kernels have computed while nobody waited for them
        self._until: dict[Stream, float] = {}
        self._events: dict[int, float] = {}

    def sleep(self, stream: Stream, seconds: float) -> None:
        """Let a stream be busy for some time after its present work."""
        self._until[stream] = max(self.now(), self.busy_until(stream)) + seconds

    def kernel_ran(self, stream: Stream, seconds: float) -> None:
        self._hidden += seconds
        self.sleep(stream, seconds)

    def now(self) -> float:
        """Return the time of a host that waits for no kernel unasked."""
        return time.perf_counter() - self._hidden

    def late(self, stream: Stream) -> float:
        """Return by how many seconds an event recorded now is later than ``perf_counter()``."""
        return max(-self._hidden, self.busy_until(stream) - time.perf_counter())

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
        self._wait_until(self._events.get(event, 0.0))

    def stream_synchronized(self, stream: Stream) -> None:
        self._wait_until(self.busy_until(stream))

    def device_synchronized(self, index: int) -> None:
        self._wait_until(
            max(
                (until for stream, until in [*self._until.items()] if stream[0] == index),
                default=0.0,
            )
        )

    def _wait_until(self, moment: float) -> None:
        left = max(0.0, moment - self.now())
        computed = min(left, self._hidden)  # that long the host has waited already
        self._hidden -= computed
        if left > computed:
            time.sleep(left - computed)


def times(context: Context) -> Sleeping | None:
    """Return the times of a context's streams; None where it has none."""
    return context.settings.get(Sleeping)


def begin(context: Context) -> Sleeping:
    """Keep the times of streams from now on. May be called again."""
    found = times(context)
    if found is None:
        found = context.settings[Sleeping] = Sleeping()
        context.observers.add(found)
        context.runtime.supplied.watch_host_waits(context)
    return found


def sleep(context: Context, cycles: int) -> None:
    """Let the current stream be busy for the time that a 1 GHz clock takes for that many cycles."""
    begin(context).sleep(context.thread.stream(), cycles / CYCLES_PER_SECOND)
