"""The values and settings that each thread has in a scope."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel.devices.current_streams import CurrentStreams
from torchdevice.kernel.devices.stream_order import Stream

Action = Callable[[], object]
"""Puts something in force, or sets it aside."""


# Not `readable_early`: with values in the class too, Dynamo before torch 2.12 makes no guard on the
# current device of the thread.
class ThreadValues(threading.local):
    """Values per thread in a scope, as CUDA keeps a current device and streams per thread.

    Attributes:
        device_index: The ordinal of the current device.
        device_text: That ordinal as text. Dynamo guards on the text, because it may make an int
            symbolic.
        streams: Ordinal -> id of the current stream.
        entered_streams: The values to restore at the end of each ``with stream`` block.
        capture: The capture of a graph in progress, if any.
        at_exit: Functions to call when the thread leaves the scope.
        at_return: Functions to call when the thread is back in the scope, as at each step of a
            decorated generator.
        forced_cpu: Whether the scope was sent to the CPU from here on.
        moving_module: How many moves of modules are in progress.
        redirects: The cache of ``Context.redirect``, emptied when the current device or
            ``forced_cpu`` changes.
    """

    def __init__(self) -> None:
        self.device_index = 0
        self.device_text = "0"
        self.streams = CurrentStreams()
        self.entered_streams: list[Any] = []
        self.capture: Any = None
        self.at_exit: list[Callable[[], None]] = []
        self.at_return: list[Callable[[], None]] = []
        self.forced_cpu = False
        self.moving_module = 0
        self.redirects: dict[Any, tuple[torch.device, str, str] | None] = {}

    def select(self, index: int) -> None:
        """Make a device current."""
        if index != self.device_index:
            self.device_index = index
            self.device_text = str(index)
            self.redirects.clear()

    def stream(self) -> Stream:
        """Return the current stream of the current device."""
        return self.device_index, self.streams.get(self.device_index, 0)

    def force_cpu(self) -> torch.device:
        """Send this thread's work to the CPU until it leaves the scope."""
        self.forced_cpu = True
        self.redirects.clear()  # their answers were the accelerator
        return torch.device("cpu")

    def begin(self) -> None:
        """Run ``at_return``, which restores this thread's earlier settings in the scope."""
        while self.at_return:
            # Removed before it runs: a step that is interrupted does not run a second time on a
            # state it has half restored.
            self.at_return.pop(0)()

    def finish(self) -> None:
        """Undo this thread's changes in the scope. Called when the thread's last entry was left."""
        if self.forced_cpu:
            self.forced_cpu = False
            self.redirects.clear()
        while self.at_exit:
            # The last one registered is the first one undone, as with nested blocks.
            self.at_exit.pop()()


class WhileInside:
    """The settings of a program in a scope, set aside while the thread is out of it.

    A thread also leaves a scope between two steps of a decorated generator.

    Args:
        thread: The thread's values in the scope.
        enter: Puts it in force.
        leave: Sets it aside.
        is_over: Returns whether it has ended while it was set aside.
    """

    def __init__(
        self, thread: ThreadValues, enter: Action, leave: Action, is_over: Callable[[], bool] = bool
    ):
        self._thread = thread
        self._enter = enter
        self._leave = leave
        self._is_over = is_over

    def begin(self) -> None:
        """Put it in force, until :meth:`end`."""
        self._enter()
        self._thread.at_exit.append(self._pause)

    def end(self) -> None:
        """Set it aside for good."""
        if self._pause in self._thread.at_exit:
            self._thread.at_exit.remove(self._pause)
            self._leave()
        elif self._resume in self._thread.at_return:
            self._thread.at_return.remove(self._resume)

    def _pause(self) -> None:
        self._leave()
        self._thread.at_return.append(self._resume)

    def _resume(self) -> None:
        if not self._is_over():
            self.begin()
