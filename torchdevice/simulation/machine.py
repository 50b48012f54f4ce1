"""State that an outermost simulated scope owns: memory, random numbers, sticky errors.

A scope's machine is held by its context, and shared by the scopes inside it and by the threads that
inherit them. A scope that is entered again goes on with its machine, as a program does with a GPU;
another scope has another machine. A tensor of a machine whose scopes have all ended keeps its
values and its memory there. A kernel that is given such a tensor in another scope allocates its
results on the machine of that scope.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.observer import Observer
from torchdevice.simulation.allocator.allocator_settings import DEFAULT, Settings


class Machine:
    """A number of simulated devices.

    Attributes:
        contexts: The active contexts whose kernels run on the devices.
        copied_bytes: Copies between devices: (source, destination) -> bytes.
        copies: Copies between devices: (source, destination) -> number.
        fallbacks: Operators that a device lacks and that ran on the CPU: name -> number of calls.
        generators: Index -> the generator from which operators draw where the program passes none.
        lost: The sticky error of CUDA: its kind and its cause; None before one.
        memory: Index -> the memory of the device (``caching_allocator.Device``).
        observers: The observers of every allocation and deallocation, called in the thread where it
            happens.
        outer_settings: Context inside another -> the settings of each device's allocator before it.
    """

    def __init__(self) -> None:
        self.contexts: set[Context] = set()
        self.copied_bytes: Counter[tuple[str, str]] = Counter()
        self.copies: Counter[tuple[str, str]] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.generators: dict[int, Any] = {}
        self.lost: tuple[tuple[str, str], str] | None = None
        self.memory: dict[int, Any] = {}
        self.observers: list[Observer] = []
        self.outer_settings: dict[Context, dict[int, Settings]] = {}

    def begin(self) -> None:
        """Reset settings, cache, peaks and the sticky error to those of a new process."""
        self.lost = None
        for each in self.memory.values():
            each.begin(DEFAULT)


_OUTSIDE = Machine()
"""Counts what is computed with tensors of simulated devices where no scope on such a device is
active.
"""


def current() -> Machine:
    """Return the machine of this thread's innermost scope on simulated devices."""
    state = thread_state.state
    if state.context is not None and state.context.devices.machine is not None:
        return state.context.devices.machine
    return outermost() or _OUTSIDE


def enter(context: Context) -> None:
    """Give a context the machine on which it works: that of the scope around it, else its own."""
    around = outermost()
    if around is None:
        own = context.devices.machine or Machine()
        context.devices.machine = own
        own.begin()
    else:
        context.devices.machine = around
        around.outer_settings[context] = {
            index: each.settings for index, each in around.memory.items()
        }
    context.devices.machine.contexts.add(context)


def leave(context: Context) -> None:
    """End a context's use of its machine, and restore the outer one's settings. Repeatable."""
    machine: Machine | None = context.devices.machine
    if machine is None:
        return
    machine.contexts.discard(context)
    for each in list(machine.memory.values()):
        if each.ended:  # there may be no further kernel that would release it
            each.release_ended()
    if context in machine.outer_settings:
        for index, each in machine.memory.items():
            each.configure(machine.outer_settings[context].get(index, DEFAULT))
        context.devices.machine = None
        del machine.outer_settings[context]


def outermost() -> Machine | None:
    """Return the machine shared by this thread's scopes; None if none is on simulated devices."""
    for entry in thread_state.state.entries:
        if entry.context is not None and entry.context.devices.machine is not None:
            return entry.context.devices.machine
    return None
