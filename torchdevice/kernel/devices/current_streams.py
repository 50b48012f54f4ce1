"""A thread's current streams, and the forward's streams, on which autograd runs nodes backward.

Torch's engine sets the stream of each node through the device's guard in C++, which Python cannot
answer. So a change of the stream is noted with the number that autograd gives the next node, and
while the engine runs, the current stream is that of the node in progress. A program that never
changes its stream pays nothing.

Source: "Stream semantics of backward passes" in torch's notes on CUDA, and
torch/csrc/autograd/engine.cpp.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from torchdevice.kernel.python.interrupt_safe_exit import block

_next_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Returns the number of the node that autograd makes next in this thread."""

_current_node = torch._C._current_autograd_node
"""Returns the node that the engine runs in this thread, also while its hooks run; None between
nodes.
"""

_metadata_of = operator.attrgetter("_input_metadata")
"""Returns torch's metadata of each gradient that a node gets."""

_OF_LEAVES = (1 << 64) - 1  # autograd numbers such nodes with the largest uint64
"""The number of every node that accumulates the gradient of a leaf."""

_KEPT = 10_000
"""The least number of changes of the stream that are remembered."""


class _History:
    """Which streams were current when autograd made a node with a number."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._streams: list[dict[int, int]] = []

    @property
    # One entry with default streams alone is no change.
    def has_changes(self) -> bool:
        return len(self._numbers) > 1 or bool(self._numbers and any(self._streams[0].values()))

    def note(self, streams: Mapping[int, int]) -> None:
        """Note that these streams are current from the next node on."""
        number = _next_number()
        # Two changes before the next node: the last one counts.
        if self._numbers and self._numbers[-1] == number:
            del self._numbers[-1], self._streams[-1]
        if not self._streams or self._streams[-1] != streams:
            self._numbers.append(number)
            self._streams.append(dict(streams))
        # Dropped in halves, so that the cost of moving the lists is spread over many changes.
        if len(self._numbers) > 2 * _KEPT:
            del self._numbers[:_KEPT], self._streams[:_KEPT]

    def at(self, number: int) -> Mapping[int, int]:
        # The last change at or before the number.
        place = bisect_right(self._numbers, number)
        return self._streams[place - 1] if place else {}


class CurrentStreams(dict[int, int]):
    """Ordinal -> id of the current stream of a thread."""

    follows_nodes = False
    """Whether autograd's engine runs, and the streams are those of the node in progress."""

    def __init__(self, history: _History | None = None) -> None:
        self.history = _History() if history is None else history

    def __setitem__(self, index: int, stream: int) -> None:
        super().__setitem__(index, stream)
        self.history.note(self)
        if on_change is not None:
            on_change()


on_change: Callable[[], None] | None = None
"""Is told that this thread's current stream changed, while kernels in C++ may ask for it."""


class _StreamsOfNodes(CurrentStreams):
    """The same while the engine runs.

    Args:
        outer: The streams that were current when the engine began.
        roots: The tensors or edges from which it goes backward.
        wait: Called with an ordinal and two streams of this device where the work goes on from the
            first on the second.
    """

    follows_nodes = True

    def __init__(
        self, outer: CurrentStreams, roots: Iterable[Any], wait: Callable[[int, int, int], None]
    ):
        super().__init__(outer.history)
        self._ambient = dict(outer)
        # `update` does not call `__setitem__`, so this notes no change.
        self.update(self._ambient)
        self._first_uses = _first_uses(roots)
        self._wait = wait
        self._node: Any = None

    def get(self, index: int, default: Any = None) -> Any:
        node = _current_node()
        # Asked at each kernel, so the usual answer is one comparison.
        if node is not self._node:
            self._node = node
            self.become(self._ambient if node is None else self._of(node))
        return super().get(index, default)

    def _of(self, node: Any) -> Mapping[int, int]:
        number = node._sequence_nr()
        if number == _OF_LEAVES:
            # A leaf's node is made where the leaf is first used, and counts as of that moment.
            number = self._first_uses.get(node)
        if number is None:
            return self._ambient
        streams = self.history.at(number)
        devices = _devices_of(node, {*self._ambient, *streams})
        # The engine sets the stream of the node's device only; other devices keep the ambient one.
        return {**self._ambient, **{index: streams.get(index, 0) for index in devices}}

    def become(self, streams: Mapping[int, int] | None = None) -> None:
        """Make streams current once earlier ones' work is done; by default the caller's."""
        wanted = self._ambient if streams is None else streams
        for index in {*wanted, *self}:
            # `dict.get`, because `get` of this class would look at the node again.
            before, now = dict.get(self, index, 0), wanted.get(index, 0)
            if before != now:
                self[index] = now
                # The new stream waits for the old one, as torch's engine orders nodes.
                self._wait(index, before, now)


def _devices_of(node: Any, known: Collection[int]) -> Collection[int]:
    """Return the ordinals of the devices whose streams the engine sets for a node's gradients.

    Where torch does not tell it, all devices with a stream in use are returned, which are
    ``known``.
    """
    try:
        devices = [each.device for each in _metadata_of(node)]
    except RuntimeError:  # a custom function before torch 2.13
        return known
    # `[:1]`: the engine takes the device of the first gradient that is on an accelerator.
    return [device.index or 0 for device in devices if device.type not in ("cpu", "meta")][:1]


def _first_uses(roots: Iterable[Any]) -> dict[Any, int]:
    """Return the node of each leaf of a graph, and the number of the first node that uses it.

    Torch makes the node of a leaf where the leaf is used first.
    """
    found: dict[Any, int] = {}
    # An edge of a graph is a node and the number of an input.
    nodes = (root.grad_fn if isinstance(root, torch.Tensor) else root[0] for root in roots)
    waiting = [each for each in nodes if each is not None]
    # Nodes are shared by several paths.
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below._sequence_nr() == _OF_LEAVES:
                found[below] = min(found.get(below, _OF_LEAVES), node._sequence_nr())
            elif below not in seen:
                seen.add(below)
                waiting.append(below)
    return found


@block
def following_nodes(
    thread: Any, roots: Any, wait: Callable[[int, int, int], None]
) -> Iterator[None]:
    """After a thread changed its stream, let its current streams be those of the running node."""
    outer = thread.streams
    with torch._C.DisableTorchFunction():
        each = (roots,) if isinstance(roots, torch.Tensor) else roots
        thread.streams = inner = _StreamsOfNodes(outer, each, wait)
    try:
        yield
    finally:
        # The streams of the caller wait for the last node.
        inner.become()
        thread.streams = outer
