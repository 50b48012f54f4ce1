"""Signal handlers on simulated devices: errors reach the program; the device stays whole."""

from __future__ import annotations

import _thread
import gc
import importlib
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.python import interrupt_safe_exit
from torchdevice.simulation import device_guard
from torchdevice.simulation.allocator import storages

pytestmark = [
    pytest.mark.interrupts,
    pytest.mark.skipif(
        not hasattr(signal, "setitimer"), reason="there are no interval timers on Windows"
    ),
]


@pytest.fixture(autouse=True)
def no_callbacks_of_others() -> Iterator[None]:
    """Python loses errors of handlers in callbacks of the collector, like hypothesis's.

    It loses the same in a finalizer, so that garbage of other tests is collected before.
    """
    before = gc.callbacks[:]
    gc.callbacks.clear()
    gc.collect()
    gc.freeze()
    yield
    gc.callbacks[:] = before


class Rang(Exception):
    """What a handler raises: a plain exception, as a time limit is."""


def ring(number: int, frame: object) -> None:
    raise Rang


@pytest.fixture(params=[Rang, KeyboardInterrupt])
def kind(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """The exception that the handler of the timer raises."""
    before = signal.signal(
        signal.SIGALRM, ring if request.param is Rang else signal.default_int_handler
    )
    yield request.param
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def repeat(function: Callable[[], Any]) -> None:
    """Call a function for ten seconds. Python 3.13 leaves the jump out of a ``try`` here."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        function()


def enter_all(scope: torchdevice.Scope, inside: list[str]) -> None:
    """Enter and leave blocks of each kind."""
    with scope, scope, noting(inside), thread_state.suspended(), noting(inside):
        pass


def in_a_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def in_use() -> int:
    gc.collect()
    return sum(block.size for block in storages.blocks(storages.device(0)))


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_training_that_is_interrupted_at_any_time(kind: type[BaseException], engine: str) -> None:
    choose, heard, kept = random.Random(0), 0, []
    lost: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, lost.append
    try:
        with torchdevice.simulate(engine=engine):
            net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(8)]).cuda()
            x = torch.ones(2, 4, device="cuda")
            net(x).sum().backward()  # what torch makes once in a process is made before
            for _ in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-5, 4e-3))
                    net(x).sum().backward()
                    time.sleep(1)
                except kind as error:
                    heard += 1
                    kept.append(error)
            in_a_thread(torch.cuda.memory_stats)  # an error that is kept keeps no lock
            kept.clear()
            net.zero_grad()
            # In this order: in_use collects garbage.
            assert in_use() == torch.cuda.memory_allocated()
            net(x).sum().backward()
            assert all(parameter.grad is not None for parameter in net.parameters())
    finally:
        sys.unraisablehook = before
    assert heard == 60 and not [each for each in lost if each.exc_type is kind]
    # torch puts a mode back when it drops what it was interrupted in. That mode serves nothing, and
    # the next scope goes without it.
    gc.collect()
    assert all(mode.context is None for mode in thread_state.stacked_modes())
    with torchdevice.portable():
        pass
    assert not thread_state.stacked_modes()


@interrupt_safe_exit.block
def noting(inside: list[str]) -> Iterator[None]:
    """A block that notes while it lasts."""
    before = len(inside)
    try:
        # Here, because Python 3.10 may raise an interrupt between a call and a `try`.
        inside.append("in")
        yield
    finally:
        del inside[before:]


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_blocks_that_are_interrupted_at_any_time_end_although_the_error_is_kept(
    kind: type[BaseException], engine: str
) -> None:
    choose, kept, inside = random.Random(1), [], list[str]()
    lost: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, lost.append
    scope = torchdevice.portable(target="cpu", engine=engine)
    try:
        for _ in range(150):
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-5, 1e-3))
                repeat(lambda: enter_all(scope, inside))
            except kind as error:
                kept.append(error)
            assert (
                not inside and not thread_state.state.entries and not thread_state.stacked_modes()
            )
    finally:
        sys.unraisablehook = before
    assert not [(each.object, each.exc_value) for each in lost], (
        "an interrupt that nothing could raise"
    )
    assert len(kept) == 150
    kept.clear()
    gc.collect()  # an error may be among the local variables of its own frames
    assert not interrupt_safe_exit._unfinished


def test_a_thread_whose_keys_were_half_set_gets_all_of_them_back(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_included, calls = registered_kernels._set_included, list[Any]()

    def interrupted(key: Any, wanted: bool) -> None:
        calls.append(key)
        if len(calls) == 2:
            raise kind
        set_included(key, wanted)

    before = str(torch._C._dispatch_tls_local_include_set())
    monkeypatch.setattr(registered_kernels, "_set_included", interrupted)
    with pytest.raises(kind):
        torchdevice.portable(target="cpu").__enter__()
    assert str(torch._C._dispatch_tls_local_include_set()) == before and len(calls) > 2


def test_a_kept_error_keeps_no_mode_for_hooks(kind: type[BaseException]) -> None:
    """A hook of ``backward`` runs with a mode that torch's stack has for the time of the call."""
    choose, kept = random.Random(2), []
    with torchdevice.portable(target="cpu"):
        mine = thread_state.stacked_modes()
        x = torch.ones(2, requires_grad=True)
        for _ in range(150):
            y = x * 2
            y.register_hook(lambda grad: grad * 1)
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-5, 1e-3))
                repeat(lambda y=y: y.sum().backward(retain_graph=True))
            except kind as error:
                kept.append(error)
            assert not thread_state.state.lent
            # torch's own block may have been interrupted, and puts the scope's mode back when the
            # error is dropped
            assert set(thread_state.stacked_modes()) <= set(mine)
        assert len(kept) == 150
        kept.clear()
        gc.collect()


@pytest.mark.one_engine
def test_an_interrupt_of_torchs_own_block_leaves_the_mode(kind: type[BaseException]) -> None:
    """Torch pops the mode for a call; the program goes on in the scope after the interrupt."""
    choose, heard = random.Random(3), 0
    with torchdevice.portable(target="cpu", engine="mode"):
        x = torch.ones(2, device="cuda")
        mine = thread_state.stacked_modes()
        for _ in range(600):
            try:
                signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-5, 4e-4))
                repeat(lambda: torch.nn.functional.softmax(x, 0))
            except kind:
                heard += 1
            assert thread_state.stacked_modes() == mine
            assert torch.ones(2, device="cuda").sum().item() == 2
    assert heard == 600


@pytest.mark.one_engine
def test_a_signal_comes_while_torch_asks_the_guard(kind: type[BaseException]) -> None:
    """torch looks the guard's method up, runs handlers, calls it: none may raise between."""
    found: list[str] = []
    with torchdevice.simulate(), pytest.raises(kind):
        method = device_guard.Guard().type_
        _thread.interrupt_main(signal.SIGALRM)
        found.append("the handler waits")
        method()
        found.append("the handler has not raised")
    assert found == ["the handler waits"]


@pytest.mark.one_engine
def test_programs_read_and_set_their_own_handlers() -> None:
    def first(*_: object) -> None: ...
    def second(*_: object) -> None: ...

    outside = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGALRM, first)
    functions = signal.signal, signal.getsignal
    try:
        with torchdevice.simulate():
            assert (
                signal.getsignal(signal.SIGALRM) is first
                and signal.getsignal(signal.SIGINT) is outside
            )
            with torchdevice.simulate("mps"):
                assert signal.signal(signal.SIGALRM, second) is first
            assert signal.getsignal(signal.SIGALRM) is second
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
            assert signal.signal(signal.SIGALRM, second) is signal.SIG_IGN
        assert (signal.signal, signal.getsignal) == functions
        assert (
            signal.getsignal(signal.SIGALRM) is second
            and signal.getsignal(signal.SIGINT) is outside
        )
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.one_engine
def test_a_thread_has_no_handlers() -> None:
    functions, seen = (signal.signal, signal.getsignal), []

    def run() -> None:
        with torchdevice.simulate():
            seen.append((signal.signal, signal.getsignal))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [functions]


@pytest.mark.one_engine
def test_more_errors_than_the_guard_has_spare_answers() -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("of a hook")

    with torchdevice.simulate():
        x = torch.ones(2, device="cuda", requires_grad=True)
        for _ in range(device_guard.SPARE + 10):
            y = x * 2
            y.register_hook(fail)
            with pytest.raises(ValueError, match="of a hook"):
                y.backward(torch.ones_like(y))


@pytest.mark.one_engine
def test_garbage_that_is_due_while_an_error_unwinds() -> None:
    """From 3.12 on Python collects where torch asks the guard, and would drop the error."""
    threshold = gc.get_threshold()
    error = ValueError("of a hook")

    def fail(grad: torch.Tensor) -> None:
        gc.set_threshold(1)
        raise error

    try:
        with torchdevice.simulate():
            y = torch.ones(2, device="cuda", requires_grad=True) * 2
            y.register_hook(fail)
            with pytest.raises(ValueError, match="of a hook") as caught:
                y.sum().backward()
    finally:
        gc.set_threshold(*threshold)
    assert caught.value is error


def dropping(raising: Callable[[], Any]) -> None:
    """Drop an object whose end calls a function. Python loses what that raises."""
    dropped = Rang()
    reference = weakref.ref(dropped, lambda _: raising())
    del dropped
    assert reference() is None


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_signal_whose_error_is_lost_comes_again(kind: type[BaseException], target: str) -> None:
    def alarmed() -> None:
        signal.raise_signal(signal.SIGALRM)
        repeat(int)

    shown: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, shown.append
    own = sys.unraisablehook
    try:
        with torchdevice.portable(target):
            with pytest.raises(kind):
                dropping(alarmed)
            assert not shown
            dropping(lambda: 1 // 0)  # another error goes to the program's hook
            read = sys.unraisablehook
        assert [each.exc_type for each in shown] == [ZeroDivisionError]
        assert sys.unraisablehook is own
        sys.unraisablehook = read  # as a program does that saved it in the scope
        dropping(lambda: 1 // 0)
        assert sys.unraisablehook is own and len(shown) == 2
    finally:
        sys.unraisablehook = before


COMPILING = """
def compiling(*args):
    signal.raise_signal(signal.SIGALRM)
    for _ in range(1000):
        went_on.append("after a signal")
    raise RuntimeError("the handler has waited for the compiler")
"""


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_compiler_is_interrupted_at_once(
    target: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Workers of xdist ignore SIGINT.
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    names: dict[str, Any] = {"signal": signal, "went_on": []}
    # In a file of the compiler: handlers run in the program's own code anyway.
    exec(compile(COMPILING, torch._inductor.__file__, "exec"), names)
    lowering = importlib.import_module("torch._inductor.graph").GraphLowering
    monkeypatch.setattr(lowering, "compile_to_module", names["compiling"])
    try:
        with (
            torchdevice.portable(target, engine=engine),  # type: ignore[arg-type]
            torch._inductor.utils.fresh_inductor_cache(),
        ):
            x = torch.ones(5, device="cuda")
            double = torch.compile(lambda x: x * 2 + 1)
            with pytest.raises(KeyboardInterrupt):
                double(x)
            assert not names["went_on"]
            assert (x + 1).sum().item() == 10
    finally:
        signal.signal(signal.SIGALRM, before)
