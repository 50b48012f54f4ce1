"""What is told of streams and events, for those who follow the order of a device's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Stream = tuple[int, int]
"""The ordinal of the stream's device and the stream's id; id 0 is the default stream."""

COLLECTIVES = -1
"""The id of the stream of a device on which collectives run."""


class StreamObserver:
    """Told of each call that orders work. Events are told apart by numbers. The base class ignores everything."""

    def stream_created(self, stream: Stream) -> None:
        """A stream is made."""

    def event_created(self, event: int) -> None:
        """An event is recorded for the first time, at which CUDA makes it."""

    def event_deleted(self, event: int) -> None:
        """An event that was recorded is gone."""

    def event_recorded(self, event: int, stream: Stream) -> None:
        """An event is recorded in a stream."""

    def event_waited(self, event: int, stream: Stream) -> None:
        """Later work of a stream waits for an event."""

    def event_synchronized(self, event: int) -> None:
        """The host has waited for an event."""

    def event_queried(self, event: int) -> None:
        """The host was told that an event is done."""

    def stream_synchronized(self, stream: Stream) -> None:
        """The host has waited for a stream."""

    def kernel_ran(self, stream: Stream, seconds: float) -> None:
        """A kernel on a stream took so long. Only told where ``watch_host_waits`` was called."""

    def stream_queried(self, stream: Stream) -> None:
        """The host was told that a stream's work is done."""

    def device_synchronized(self, index: int) -> None:
        """The host has waited for a device."""

    def memory_used(self, tensor: Any, stream: Stream) -> None:
        """The allocator is told by ``record_stream`` that a stream uses a tensor's memory."""

    def collective_used(self, name: str, tensor: Any, writes: bool) -> None:
        """A collective, which waits for the current stream of a tensor's device, reads or writes the tensor."""

    def collectives_waited(self) -> None:
        """The current stream of each device waits for the collectives so far."""

    def graph_captured(self, graph: int, pool: Any, capture: Any) -> None:
        """A graph is captured, with a memory pool: a ``Capture`` of ``torch_modules/cuda/graph_capture.py``."""

    def graph_replayed(self, graph: int, pool: Any, index: int) -> None:
        """A graph was replayed on a device's current stream. Its results are in a memory pool."""

    def backward_began(self) -> None:
        """The autograd engine begins, which orders its work after that of the forward on any stream."""


class Observers:
    """Who watches a scope.

    Attributes:
        order: Told of each call that orders work.
        memory: Called when memory runs out, with the ordinal, the bytes that were asked for, the bytes of the device
            and those that are free.
    """

    def __init__(self) -> None:
        self.order: list[StreamObserver] = []
        self.memory: list[Callable[[int, int, int, int], None]] = []

    def tell(self, event: str, *values: Any) -> None:
        """Tell the observers of a call that orders work: ``event`` is their method."""
        for observer in [*self.order]:  # one that ends takes itself out
            getattr(observer, event)(*values)
