"""The one way to watch a scope. Observers see kernels, memory, and calls that order work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchdevice.kernel.devices.device_memory import Block
from torchdevice.kernel.devices.stream_order import Stream


class Observer:
    """Watches a scope. The base class ignores everything.

    A class defines the methods of the events it needs, and gets no others: an observer of memory
    costs a kernel nothing. Events of CUDA have numbers.

    Attributes:
        watches: The kinds of events that the class has methods for: "kernels", "memory", "out of
            memory", "collectives", "order".
    """

    watches: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        cls.watches = frozenset(
            kind
            for kind, names in _METHODS.items()
            if any(getattr(cls, name) is not getattr(Observer, name) for name in names)
        )

    # ---- kernels of devices that this package supplies -------------------------------------------

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the kernel of an operator, and return its result."""
        return kernel(*args, **kwargs)

    # ---- memory ----------------------------------------------------------------------------------

    def allocated(self, block: Block) -> None:
        """A block is given out."""

    def freed(self, address: int) -> None:
        """The block at an address was freed, perhaps by a garbage collection between any lines."""

    def segment_changed(self, action: str, segment: Block, stream: int) -> None:
        """A segment got or returned driver memory; ``action`` is CUDA's memory history's word."""

    def memory_ran_out(self, ordinal: int, wanted: int, total: int, free: int) -> None:
        """A device with ``free`` of ``total`` bytes could not give the ``wanted`` bytes."""

    # ---- collectives -----------------------------------------------------------------------------

    def collective_used(self, name: str, tensor: Any, writes: bool) -> None:
        """A collective uses a tensor, after it waited for the current stream of its device."""

    def collectives_waited(self) -> None:
        """The current stream of each device waits for the collectives so far."""

    # ---- the order of work -----------------------------------------------------------------------

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
        """A kernel on a stream took so long. Only reported after ``watch_host_waits``."""

    def stream_queried(self, stream: Stream) -> None:
        """The host was told that a stream's work is done."""

    def device_synchronized(self, index: int) -> None:
        """The host has waited for a device."""

    def memory_used(self, tensor: Any, stream: Stream) -> None:
        """The allocator is told by ``record_stream`` that a stream uses a tensor's memory."""

    def graph_captured(self, graph: int, pool: Any, capture: Any) -> None:
        """A graph with a memory pool is captured: a ``Capture`` of ``graph_capture.py``."""

    def graph_replayed(self, graph: int, pool: Any, index: int) -> None:
        """A graph was replayed on a device's current stream. Its results are in a memory pool."""

    def backward_began(self) -> None:
        """The autograd engine begins. Its work follows that of the forward on any stream."""


_METHODS = {
    "kernels": ("run",),
    "memory": ("allocated", "freed", "segment_changed"),
    "out of memory": ("memory_ran_out",),
    "collectives": ("collective_used", "collectives_waited"),
}
_METHODS["order"] = tuple(
    name
    for name, method in vars(Observer).items()
    if callable(method)
    and not name.startswith("_")
    and not any(name in names for names in _METHODS.values())
)


class Observers:
    """The observers of a context.

    Args:
        watch_memory: Reports each allocation to an observer from now on, and returns a function
            that ends this.
        kernels_changed: Called when an observer of kernels comes or goes.

    Attributes:
        kernels: Those that run kernels, the innermost first.
        order: Those of calls that order work.
        out_of_memory: Those of exhausted memory.
        collectives: Those of collectives.
    """

    def __init__(
        self,
        watch_memory: Callable[[Observer], Callable[[], None]],
        kernels_changed: Callable[[], None],
    ):
        self.kernels: list[Observer] = []
        self.order: list[Observer] = []
        self.out_of_memory: list[Observer] = []
        self.collectives: list[Observer] = []
        self._watch_memory = watch_memory
        self._kernels_changed = kernels_changed
        self._ends: list[tuple[Observer, list[Callable[[], None]]]] = []

    def add(self, observer: Observer) -> Callable[[], None]:
        """Report to an observer the events that its class has methods for, from now on.

        Returns:
            A function that ends this. It may be called again.
        """
        ends: list[Callable[[], None]] = []
        # First, so that an observer can be ended that an interrupt left half added.
        self._ends.append((observer, ends))
        for kind, told in (
            ("order", self.order),
            ("out of memory", self.out_of_memory),
            ("collectives", self.collectives),
            ("kernels", self.kernels),
        ):
            if kind in observer.watches:
                ends.append(functools.partial(_remove, told, observer))
                told.append(observer)
        if "memory" in observer.watches:
            ends.append(self._watch_memory(observer))
        if "kernels" in observer.watches:
            ends.append(self._kernels_changed)
            self._kernels_changed()
        # No function that knows itself: such a circle would keep what its owner holds.
        return functools.partial(self._end, ends)

    def _end(self, ends: list[Callable[[], None]]) -> None:
        for each in ends:
            each()
        # They hold the observer, which may hold the function that ends it, and with it tensors.
        ends.clear()
        self._ends[:] = [each for each in self._ends if each[1] is not ends]

    def end(self, *kinds: type[Observer]) -> list[Observer]:
        """Remove the observers of these classes, and return them. May be repeated."""
        if not self._ends:
            return []
        found = [each for each in self._ends if isinstance(each[0], kinds)]
        for _, ends in found:
            self._end(ends)
        return [observer for observer, _ in found]

    def tell(self, event: str, *values: Any) -> None:
        """Tell the observers of a call that orders work: ``event`` is their method."""
        for observer in [*self.order]:  # one that ends takes itself out
            getattr(observer, event)(*values)


def _remove(told: list[Observer], observer: Observer) -> None:
    # In place, since others hold the very list.
    told[:] = [each for each in told if each is not observer]
