"""The line of the program that calls an operator; in backward that of the forward operator.

Autograd numbers the functions that it will call in backward, when the forward operators make them.
So the number of the function that runs in backward tells the forward operator, if it was called in
the same thread and scope.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

import torch

from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.journal import callers
from torchdevice.kernel.journal.callers import OURS, PROGRAM, Site, program_line, site_of

_current_node = torch._C._current_autograd_node

_KEPT = 100_000
"""How many lines of forward operators are remembered."""


class Where(NamedTuple):
    """Where an operator is called, as in a finding."""

    site: Site
    backward: Site | None
    library: Site | None


class BackwardCalls(Observer):
    """Remembers the line that last called backward, for the engine's threads, which have none."""

    def __init__(self) -> None:
        self.last: Site | None = None

    def backward_began(self) -> None:
        self.last = site_of(program_line())


class Lines:
    """The lines of one thread's operators."""

    def __init__(self, calls: BackwardCalls) -> None:
        self._calls = calls
        self._forward: dict[int, Site] = {}

    def note(self) -> None:
        """Remember the line of a forward operator for which autograd has made a function."""
        if _current_node() is not None:
            return
        number = torch._C._autograd._get_sequence_nr() - 1
        if number not in self._forward:
            if len(self._forward) >= _KEPT:
                del self._forward[next(iter(self._forward))]
            self._forward[number] = site_of(program_line())

    def here(self) -> Where:
        """Return where the operator is called that is being handled."""
        caller = callers.caller_frame()
        node = _current_node()
        in_backward = _within_backward(sys._getframe()) if node is not None else None
        if node is None or in_backward is not None:
            program = in_backward or callers.program_frame(caller)[0] or caller
            return Where(site_of(program), None, site_of(caller) if program is not caller else None)
        called = callers.program_frame(caller)[0]
        backward = site_of(called) if called is not None else self._calls.last or site_of(caller)
        return Where(self._forward.get(node._sequence_nr(), backward), backward, None)


def _within_backward(frame: FrameType) -> FrameType | None:
    """Return the program's innermost frame called by backward: a custom function or a hook."""
    current: FrameType | None = frame
    while current is not None and (
        current.f_code.co_name != "_engine_run_backward" or callers.kind_of(current) != OURS
    ):
        if callers.kind_of(current) == PROGRAM:
            return current
        current = current.f_back
    return None
