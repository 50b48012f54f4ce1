"""Interrupts and re-entry at every line of entering and leaving.

A trace function raises ``KeyboardInterrupt`` at one line of this package after the other, while a
scope is entered and left. After each interrupt the tests check that torch is as it was before, that
the thread's state is right, and that the next entry works. Another test enters and leaves a second
scope at each line, as a destructor or a signal handler may.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

import torchdevice
from torchdevice.calls import wrap
from torchdevice.kernel import thread_state
from torchdevice.kernel.python import garbage_collection
from torchdevice.kernel.thread_state import ContextMode
from torchdevice.scope import installed

# Python reports an exception in a destructor, an injected interrupt too, as unraisable.
pytestmark = [
    pytest.mark.interrupts,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(7200),  # the complete sweep runs some ten thousand cycles line by line
]

PACKAGE = str(Path(torchdevice.__file__).parent) + os.sep

Line = tuple[str, int, int]
"""File, line number, and how often that line was reached before."""


class Injector:
    """Calls an action at one line reached while active, and counts the lines before it.

    Args:
        at: The number of the line, in the order in which lines are reached; -1 for none.
        action: What to call there; an exception that it raises is raised at that line.
        files: Prefix of the files whose lines count.
    """

    def __init__(self, at: int, action: Callable[[], None], files: str = PACKAGE):
        self.at, self.action, self.files = at, action, files
        self.reached = 0
        self.where = ""

    def __enter__(self) -> Injector:
        # Lines of cycle() count too, because its ``with`` statement enters and leaves the scope.
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files) and frame.f_code.co_name != "cycle":
            return None
        if event == "line":
            number, self.reached = self.reached, self.reached + 1
            if number == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                self.action()
        return self._trace


def interrupt() -> None:
    raise KeyboardInterrupt


def cycle(make: Callable[[], torchdevice.Scope]) -> None:
    """Enter and leave a scope by ``with``."""
    with make():
        pass


def decorated_cycle(make: Callable[[], torchdevice.Scope]) -> None:
    """Enter and leave a scope by a call of a decorated function."""
    make()(lambda: None)()


def generator_cycle(make: Callable[[], torchdevice.Scope]) -> None:
    """Enter and leave a scope for each step of a decorated generator."""

    def steps() -> Iterator[int]:
        yield 1
        yield 2

    list(make()(steps)())


WAYS = {"with": cycle, "decorator": decorated_cycle, "generator": generator_cycle}


def state_of_thread() -> dict[str, Any]:
    state = thread_state.state
    return {
        "entries": len(state.entries),
        "context": state.context,
        "for cuda": state.for_cuda,
        "mode": state.mode,
        "lifted": len(state.lifted),
        "stacked": len(state.stacked),
        "stack": torch.overrides._get_current_function_mode_stack(),
        "initializing": "is_initializing" in vars(torch.cuda._tls),
        "multithreading": torch._C._is_multithreading_enabled(),
        "available": torch.cuda.is_available(),
        "generator": type(torch.Generator()),
        "tensor": torch.ones(2).device.type,
    }


def assert_inside_and_outside(make: Callable[[], torchdevice.Scope]) -> None:
    """Enter and leave a scope. Check that all works inside, and that no patch remains outside."""
    with make() as scope:
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        assert torch.ones(2, device="cuda").sum().item() == 2
        assert torch.zeros(1).cuda().get_device() in (-1, 0)
        assert torchdevice.current() is scope
    wrapped = (wrap._FOR_EVERY_SCOPE, *wrap._INSTALLATIONS.values(), *wrap._OF_RUNTIMES.values())
    for installation in (installed.INSTALLATION, *wrapped):
        assert not installation._holders and installation._in_place is False


def makers(target: str, engine: str) -> Callable[[], torchdevice.Scope]:
    return functools.partial(torchdevice.portable, target, engine=engine)


def lines_of(way: Callable[..., None], make: Callable[[], torchdevice.Scope]) -> int:
    """Return the number of lines that a cycle runs."""
    way(make)  # builds what is built once in a process
    way(make)
    gc.collect()  # here, because interrupted uses of scopes run lines when they are collected
    counts = []
    for _ in range(3):  # the garbage collector may run more lines in one of them
        with Injector(-1, interrupt) as counter:
            way(make)
        counts.append(counter.reached)
    assert min(counts) > 50
    return min(counts)


def chosen_lines(count: int, sweep: tuple[bool, int], sample: int) -> list[int]:
    """Return the numbers of all lines in a complete sweep, else a seeded sample of them."""
    everything, seed = sweep
    return (
        list(range(count))
        if everything
        else sorted(random.Random(seed).sample(range(count), min(sample, count)))
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_at_any_line(
    target: str, engine: str, way: str, sweep: tuple[bool, int]
) -> None:
    """An interrupt at any line leaves the thread wholly in the scope or wholly out of it."""
    make, run = makers(target, engine), WAYS[way]
    before, count = state_of_thread(), lines_of(run, make)
    interrupted = 0
    for number in chosen_lines(count, sweep, 90):
        with Injector(number, interrupt) as injector:
            try:
                run(make)
            except KeyboardInterrupt:
                interrupted += 1
        assert state_of_thread() == before, f"interrupted at {injector.where}"
        assert_inside_and_outside(make)
    assert interrupted > 60
    assert lines_of(run, make) < 1.05 * count, (
        "interrupts left something that each later entry walks over"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("way", WAYS)
def test_another_scope_at_any_line(
    target: str, engine: str, way: str, sweep: tuple[bool, int]
) -> None:
    make, run = makers(target, engine), WAYS[way]
    before, count = state_of_thread(), lines_of(run, make)
    seen: list[bool] = []

    def enter_another() -> None:
        with torchdevice.portable("cpu", engine=engine):
            seen.append(torch.cuda.is_available() and torch.ones(1, device="cuda").item() == 1)

    numbers = chosen_lines(count, sweep, 50)
    for number in numbers:
        with Injector(number, enter_another) as injector:
            run(make)
        assert state_of_thread() == before, f"entered another at {injector.where}"
        assert_inside_and_outside(make)
    assert seen == [True] * len(numbers)
    assert lines_of(run, make) < 1.05 * count, "scopes entered on the way left something behind"


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_scope_that_is_entered_at_any_line_and_stays(
    target: str, engine: str, sweep: tuple[bool, int]
) -> None:
    """A scope stays active if entered half way through another entry or exit, as by a signal."""
    make = makers(target, engine)
    before = state_of_thread()
    for number in chosen_lines(lines_of(cycle, make), sweep, 40):
        with Injector(number, lambda: torchdevice.enable("cpu", engine=engine)) as injector:
            try:
                cycle(make)
            except torchdevice.errors.ScopeError as error:
                assert "left before a scope entered after it" in str(error)
        assert torch.cuda.is_available() and torch.ones(2, device="cuda").sum().item() == 2, (
            injector.where
        )
        torchdevice.disable()
        assert state_of_thread() == before, f"entered another at {injector.where}"
        assert_inside_and_outside(make)


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_abandoned_generators_are_collected_at_any_time(chosen: str, engine: str) -> None:
    """A decorated generator in a cycle leaves its scope on collection, inside other scopes too."""

    def abandon() -> None:
        @torchdevice.portable(engine=engine)
        def steps() -> Iterator[int]:
            try:
                yield 1
                yield 2
            finally:
                assert torch.cuda.is_available()

        generator = steps()
        next(generator)
        circle: list[Any] = [generator]
        circle.append(circle)

    before, threshold = state_of_thread(), gc.get_threshold()
    gc.set_threshold(15)
    try:
        for _ in range(300):
            abandon()
            with torchdevice.portable(engine=engine):
                assert torch.cuda.is_available()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert state_of_thread() == before


@pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="there are no interval timers on Windows"
)
def test_timed_interrupts(chosen: str) -> None:
    """Timer interrupts at random times in calls of a decorated function, like ``Ctrl-C``."""
    assert threading.current_thread() is threading.main_thread()
    step = torchdevice.portable(lambda: torch.ones(2, device="cuda").sum().item())
    step()
    before, rng, caught = state_of_thread(), random.Random(0), 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 3e-3))
                for _ in range(30):
                    step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                caught += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert state_of_thread() == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert caught > 50
    assert step() == 2


def test_a_signal_handler_that_uses_a_scope(chosen: str) -> None:
    seen: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        with torchdevice.portable("cpu"):
            seen.append(torch.cuda.is_available())

    before = state_of_thread()
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        rng = random.Random(0)
        while len(seen) < 100:
            # One signal: a steady stream would starve.
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-3))
            for _ in range(5):
                with torchdevice.portable():
                    assert torch.cuda.is_available()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert all(seen) and state_of_thread() == before


@pytest.mark.parametrize("file", [torch.overrides.__file__, contextlib.__file__])
@pytest.mark.parametrize("kept", [False, True], ids=["error dropped", "error kept"])
def test_an_interrupt_in_torchs_own_block(kept: bool, file: str, chosen: str) -> None:
    """Torch may then lose the mode. The next entry finds it stacked, even if frames are kept."""

    def call() -> None:
        torch.nn.functional.softmax(torch.ones(2, device="cuda"), dim=0)

    def on_stack() -> int:
        return sum(
            isinstance(mode, ContextMode)
            for mode in torch.overrides._get_current_function_mode_stack()
        )

    before = state_of_thread()
    # Without the collector: in a destructor that it calls, the interrupt would count and be lost.
    with torchdevice.portable(engine="mode"), garbage_collection.paused():
        call()  # what the first call in a process does once is not counted
        with Injector(-1, interrupt, files=file) as counter:
            call()
        lost = 0
        for number in range(counter.reached):
            error: BaseException | None = None
            with Injector(number, interrupt, files=file):
                try:
                    call()
                except KeyboardInterrupt as caught:
                    error = caught
            assert error is not None
            lost += on_stack() == 0
            if not kept:
                error = None
            with torchdevice.portable("cpu"):
                assert torch.ones(2, device="cuda").sum().item() == 2 and on_stack() == 1
            error = None
            with torchdevice.portable("cpu"):
                call()
            assert on_stack() == 1 and torch.ones(2, device="cuda").sum().item() == 2
        assert lost
    assert state_of_thread() == before


def lose(above: Any) -> None:
    """Remove the mode below another, in a function that has ended when the mode is sought."""
    for _ in range(2):
        torch._C._pop_torch_function_stack()
    torch._C._push_on_torch_function_stack(above)


def test_a_lost_mode_gets_its_place_again(chosen: str) -> None:
    """The program's own modes take themselves off blindly, so each must be where it was."""
    stack = torch.overrides._get_current_function_mode_stack
    before = state_of_thread()
    with (
        BaseTorchFunctionMode(),
        torchdevice.portable(engine="mode"),
        BaseTorchFunctionMode() as above,
    ):
        whole = stack()
        lose(above)
        with torchdevice.portable("cpu"):
            assert stack() == whole
        # As torch's own block does late, when an error is dropped.
        torch._C._push_on_torch_function_stack(whole[1])
        with torchdevice.portable("cpu"):
            assert stack() == whole
    assert state_of_thread() == before


@pytest.mark.parametrize(
    "first", [None, {"devices": 2, "propagate": True}], ids=["first", "second"]
)
def test_an_interrupt_at_any_line_of_enable(
    first: dict[str, Any] | None, sweep: tuple[bool, int]
) -> None:
    """Whatever an interrupted ``enable()`` has left, one ``disable()`` ends it."""

    def cycle() -> None:
        if first is not None:
            torchdevice.enable("cpu", **first)
        torchdevice.enable("cpu", devices=3, propagate=True)

    cycle()
    torchdevice.disable()
    before, environment = state_of_thread(), dict(os.environ)
    with Injector(-1, interrupt) as counter:
        cycle()
    torchdevice.disable()
    for number in chosen_lines(counter.reached, sweep, 150):
        with Injector(number, interrupt) as injector, contextlib.suppress(KeyboardInterrupt):
            cycle()
        if torchdevice.current() is not None:
            assert torch.ones(2, device="cuda").sum().item() == 2
            torchdevice.disable()
        assert state_of_thread() == before and dict(os.environ) == environment, injector.where
        assert_inside_and_outside(makers("cpu", "mode"))
