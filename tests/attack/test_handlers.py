"""Code Python runs at any time, using the device: signal handlers, destructors, callbacks.

Each comes at one step of this package after the other, while a small network is trained. Afterwards
what it saw and did is right, the training has the values that it has without it, and so have the
figures of memory and torch's stack.
"""

from __future__ import annotations

import _thread
import functools
import gc
import io
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.kernel import thread_state
from torchdevice.simulation import device_guard
from torchdevice.simulation.allocator.caching_allocator import Device
from torchdevice.simulation.allocator.memory_blocks import Block

pytestmark = [
    pytest.mark.interrupts,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

PACKAGE = str(Path(torchdevice.__file__).parent) + os.sep

NUMBER = signal.SIGTERM


# Resumed by torch's questions to the guard. Between its opcodes Python neither looks for signals
# nor collects garbage.
_UNINTERRUPTED = device_guard._lookups.__code__


class At:
    """Makes an event happen at one step of the package while active, and counts the steps.

    Args:
        at: The number of the step; -1 for none.
        come: Lets it come.
        event: What a step is: ``"line"`` or ``"opcode"``.
    """

    def __init__(self, at: int, come: Callable[[], None], event: str):
        self.at, self.come, self.event = at, come, event
        self.reached = 0
        self.where = ""

    def __enter__(self) -> At:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code is _UNINTERRUPTED:
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        if event == self.event:
            self.reached += 1
            if self.reached - 1 == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                if self.come is by_signal:
                    # Python would run the handler in this frame after a call. Unpacking is none.
                    (_,) = map(_thread.interrupt_main, (NUMBER,))
                    return None
                self.come()
        return self._trace


class Visitor:
    """What comes: it saves and loads a checkpoint, and uses the device otherwise."""

    def __init__(self) -> None:
        self.weights = torch.nn.Linear(3, 4).cuda().state_dict()
        self.device = torch.zeros(1, device="cuda").device
        self.errors: list[BaseException] = []
        self.references: list[Any] = []
        self.came = 0
        self.trains = False

    def __call__(self, *_: Any) -> None:
        self._visit(self._use_the_device)

    def use_what_is_there(self) -> None:
        self._visit(self._compute)

    def _visit(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            self.errors.append(error)
        self.came += 1

    def _compute(self) -> None:
        weight = self.weights["weight"]
        large = weight.new_zeros(600_000)
        assert large.device == weight.device and (large + 1).sum().item() == 600_000
        assert torch.equal((weight * 2).cpu(), weight.cpu() * 2)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_stats() is not None

    def _use_the_device(self) -> None:
        made = torch.ones(4, device="cuda")
        assert made.device == torch.zeros(1).cuda().device == self.device
        assert (made * 2 + torch.arange(4).to("cuda:0")).tolist() == [2, 3, 4, 5]
        large = torch.zeros(600_000, device="cuda")
        large[3] = 1
        assert large.sum().item() == 1
        saved = io.BytesIO()
        torch.save({name: value.cpu() for name, value in self.weights.items()}, saved)
        saved.seek(0)
        loaded = torch.load(saved, map_location="cuda")
        assert all(loaded[name].device == self.device for name in self.weights)
        assert all(torch.equal(loaded[name], value) for name, value in self.weights.items())
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() >= 0 and torch.cuda.memory_stats() is not None
        if self.trains:
            with torch.enable_grad():
                x = torch.ones(2, device="cuda", requires_grad=True)
                (x * x).sum().backward()
                assert x.grad is not None and x.grad.tolist() == [2, 2]


def train() -> list[Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.arange(6.0, device="cuda").reshape(2, 3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
    large = torch.zeros(700_000, device="cuda")
    large[3] = 1
    doubled = large + large
    del large
    drawn = torch.randn(5, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    moved = torch.tensor([1, 2, 3], device="cuda").float().to("cuda").cpu()
    result = [
        loss.item(),
        doubled.sum().item(),
        drawn.tolist(),
        moved.tolist(),
        net[0].weight.tolist(),
    ]
    after(result)
    return result


def after(result: list[Any]) -> None:
    """Let a signal come that waits still."""


def by_signal() -> None:
    """See :class:`At`."""


class Circle:
    """What only a garbage collection frees, and the visitor comes then."""

    def __init__(self, visitor: Visitor) -> None:
        self.visitor, self.itself = visitor, self

    def __del__(self) -> None:
        self.visitor()


class Dropped:
    """What is freed at once, and the visitor comes then."""

    def __init__(self, visitor: Visitor) -> None:
        self.visitor = visitor

    def __del__(self) -> None:
        self.visitor.use_what_is_there()


def figures() -> tuple[Any, ...]:
    gc.collect()
    exact = torch.zeros(1).cuda().device.type != "cpu"
    stats = torch.cuda.memory_stats()
    names = (
        "allocated_bytes",
        "reserved_bytes",
        "requested_bytes",
        "allocation",
        "segment",
        "inactive_split_bytes",
    )
    return (
        [stats[f"{name}.all.current"] for name in names] if exact else None,
        torch.overrides._get_current_function_mode_stack(),
        thread_state.state.mode,
        dict(thread_state.state.lent),
        len(thread_state.state.entries),
        gc.isenabled(),
    )


def by_destructor(visitor: Visitor) -> None:
    Circle(visitor)
    gc.collect()


def by_weak_reference(visitor: Visitor) -> None:
    circle = [Referred()]
    circle[0].itself = circle
    visitor.references.append(weakref.ref(circle[0], visitor))
    del circle
    gc.collect()


class Referred:
    itself: Any


def by_callback_of_collections(visitor: Visitor) -> None:
    def called(phase: str, info: Any) -> None:
        if phase == "stop":
            visitor()

    gc.callbacks.append(called)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(called)


def by_dropped_reference(visitor: Visitor) -> None:
    """It comes without a collection, so without the mode, and uses tensors of the device."""
    Dropped(visitor)


WAYS = {
    each.__name__: each
    for each in (by_destructor, by_weak_reference, by_callback_of_collections, by_dropped_reference)
}


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(NUMBER)
    yield lambda handler: signal.signal(NUMBER, handler)
    signal.signal(NUMBER, before)


def check_at_steps(
    visitor: Visitor, come: Callable[[], None], event: str, sweep: tuple[bool, int], size: int
) -> None:
    """Let the visitor come at a sample of the steps, in a complete sweep at each fiftieth."""
    train()
    expected, counts = train(), []
    for _ in range(3):
        before = figures()
        with At(-1, come, event) as counter:
            train()
        counts.append(counter.reached)
    count = min(counts)
    assert count > 1000
    everything, seed = sweep
    for number in sorted(
        random.Random(seed).sample(range(count), count // 50 if everything else size)
    ):
        visitor.came = 0
        with At(number, come, event) as at:
            result = train()
        assert visitor.errors == [], at.where
        assert visitor.came == 1, at.where
        assert result == expected, at.where
        assert figures() == before, at.where


@pytest.fixture
def scope(target: str, engine: str) -> Iterator[None]:
    """A scope, and no garbage collection but those of the tests."""
    gc.disable()
    with torchdevice.portable(target, engine=engine):
        yield
    gc.enable()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("event", ["line", "opcode"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_handler_of_a_signal_at_any_step(
    scope: None, engine: str, event: str, sweep: tuple[bool, int]
) -> None:
    visitor = Visitor()
    visitor.trains = True
    visitor()
    before = signal.signal(NUMBER, visitor)
    try:
        check_at_steps(visitor, by_signal, event, sweep, 30)
    finally:
        signal.signal(NUMBER, before)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("event", ["line", "opcode"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_destructor_at_any_step(
    scope: None, engine: str, way: str, event: str, sweep: tuple[bool, int]
) -> None:
    visitor = Visitor()
    WAYS[way](visitor)
    check_at_steps(visitor, lambda: WAYS[way](visitor), event, sweep, 20)


class Keeps(torch.autograd.Function):
    """Its node of the graph holds an object of the program."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: Any) -> torch.Tensor:
        ctx.kept = kept
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2, None


class Ends:
    """The visitor comes at the end of this, which no garbage collection waits for."""

    def __init__(self, visitor: Visitor) -> None:
        self.visitor = visitor

    def __del__(self) -> None:
        self.visitor()


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(3, device="cuda"))
    made.grad = torch.ones(3, device="cuda")
    return made


def a_gradient_is_set(visitor: Visitor) -> None:
    held = parameter()
    visitor.references.append(weakref.ref(held.grad, visitor))
    held.grad = None


def a_gradient_is_deleted(visitor: Visitor) -> None:
    held = parameter()
    held.grad.kept = Ends(visitor)  # type: ignore[union-attr]
    del held.grad


def gradients_are_zeroed(visitor: Visitor) -> None:
    held = parameter()
    weakref.finalize(held.grad, visitor)
    torch.optim.SGD([held], lr=0.1).zero_grad()


def a_graph_is_dropped(visitor: Visitor) -> None:
    Keeps.apply(parameter(), Ends(visitor)).detach_()


def a_graph_is_dropped_by_the_function(visitor: Visitor) -> None:
    torch.detach_(Keeps.apply(parameter(), Ends(visitor)))


def a_graph_has_been_used(visitor: Visitor) -> None:
    Keeps.apply(parameter(), Ends(visitor)).sum().backward()


def hooks_are_dropped(visitor: Visitor) -> None:
    held = parameter()
    held.register_hook(functools.partial(print, Ends(visitor)))
    held._backward_hooks = None


def an_argument_is_dropped(visitor: Visitor) -> None:
    made = torch.ones(3, device="cuda")
    made.kept = Ends(visitor)  # type: ignore[attr-defined]
    arguments = [made]
    del made
    torch.add(arguments.pop(), 1)


def on_the_device(visitor: Visitor) -> torch.Tensor:
    """Return a tensor whose storage has a callback that uses the device."""
    made = torch.ones(3, device="cuda")
    weakref.finalize(made.untyped_storage(), visitor)
    return made


def a_storage_is_set(visitor: Visitor) -> None:
    on_the_device(visitor).set_(torch.zeros(2, device="cuda").untyped_storage(), 0, (2,))


def a_whole_storage_is_set(visitor: Visitor) -> None:
    on_the_device(visitor).set_(torch.zeros(2, device="cuda").untyped_storage())


def the_storage_of_another_is_set(visitor: Visitor) -> None:
    on_the_device(visitor).set_(torch.zeros(2, device="cuda"))


def no_storage_is_set(visitor: Visitor) -> None:
    on_the_device(visitor).set_()


def data_are_set(visitor: Visitor) -> None:
    on_the_device(visitor).data = torch.zeros(2, device="cuda")


def data_on_another_device_are_set(visitor: Visitor) -> None:
    on_the_device(visitor).data = torch.zeros(2)


CALLS_THAT_DROP = [
    a_storage_is_set,
    a_whole_storage_is_set,
    the_storage_of_another_is_set,
    no_storage_is_set,
    data_are_set,
    data_on_another_device_are_set,
    a_gradient_is_set,
    a_gradient_is_deleted,
    gradients_are_zeroed,
    a_graph_is_dropped,
    a_graph_is_dropped_by_the_function,
    a_graph_has_been_used,
    hooks_are_dropped,
    an_argument_is_dropped,
]


@pytest.mark.parametrize("call", CALLS_THAT_DROP, ids=lambda call: call.__name__)
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_destructor_of_what_a_call_drops(
    scope: None, engine: str, call: Callable[[Visitor], None]
) -> None:
    visitor = Visitor()
    visitor()  # it reserves memory
    before = figures()
    call(visitor)
    assert visitor.errors == [] and visitor.came == 2
    visitor.references.clear()
    assert figures() == before


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_handler_while_a_compiler_has_suspended_the_scope(scope: None, engine: str) -> None:
    visitor = Visitor()
    before = signal.signal(NUMBER, visitor)
    try:
        with thread_state.suspended(compiling=True), torch._C.DisableTorchFunction():
            modes = torch.overrides._get_current_function_mode_stack()
            signal.raise_signal(NUMBER)
            assert torch.overrides._get_current_function_mode_stack() == modes
            assert thread_state.state.context is None and thread_state.state.compiling
    finally:
        signal.signal(NUMBER, before)
    assert visitor.came == 1 and visitor.errors == []


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_handler_inside_code_that_torch_calls(scope: None, engine: str) -> None:
    """Code of the program is not waited for, where torch calls it: the mode may be off there."""
    visitor, seen = Visitor(), []
    before = signal.signal(NUMBER, visitor)

    def change(value: float) -> float:
        signal.raise_signal(NUMBER)
        seen.append(visitor.came)
        return value + 1

    try:
        assert torch.zeros(2).apply_(change).tolist() == [1, 1]
        x = torch.ones(2, device="cuda", requires_grad=True)
        x.register_hook(lambda grad: grad * change(0))
        x.sum().backward()
    finally:
        signal.signal(NUMBER, before)
    assert seen == [1, 2, 3] and visitor.errors == []


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_collections_leave_no_callbacks_behind(target: str, engine: str) -> None:
    before = gc.callbacks[:]
    with torchdevice.portable(target, engine=engine), torchdevice.portable("cpu"):
        assert len(gc.callbacks) == len(before) + 2
        in_thread = threading.Thread(target=gc.collect)
        in_thread.start()
        in_thread.join()
    assert gc.callbacks == before


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_destructor_leaves_the_scope(target: str, engine: str) -> None:
    """It does so in a collection inside a call that the mode handles, where the mode is lent."""
    before, scope, left = gc.callbacks[:], torchdevice.portable(target, engine=engine), []

    class Leaves:
        itself: Any

        def __del__(self) -> None:
            scope.__exit__(None, None, None)
            left.append(torch.cuda.is_available())

    def collect(value: float) -> float:
        leaves = Leaves()
        leaves.itself = leaves
        del leaves
        gc.collect()
        return value

    scope.__enter__()
    torch.zeros(1).apply_(collect)
    assert left == [False] and gc.callbacks == before
    with torchdevice.portable("cpu"):  # takes off what torch put back after the call
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert not thread_state.stacked_modes() and not thread_state.state.lent


PER_DEVICE = 1 << 45
"""How many addresses a device has."""


class _Asking:
    """Requests memory amid a change of the allocator, in the query of a growing device's limit."""

    def __init__(self) -> None:
        self.device: Device | None = None
        self.asked: list[Block] = []
        self.size = 0

    def __call__(self, index: int) -> tuple[int | None, int | None]:
        size, self.size = self.size, 0
        if size and self.device is not None:
            self.asked.append(self.device.allocate(size))
            assert self.device.figures() is not None
            self.device.reset_peak()
            self.device.empty_cache()
        return (None, None)


@pytest.mark.one_engine
class TestMemoryInTheMiddleOfAChange:
    """A destructor's allocations amid a change of the allocator are counted after the change."""

    def made(self) -> tuple[Device, _Asking]:
        asking = _Asking()
        asking.device = Device(0, asking)
        return asking.device, asking

    def test_it_gets_memory_as_a_request_afterwards_does(self) -> None:
        device, asking = self.made()
        asking.size = 1000
        first = device.allocate(5_000_000)
        (late,) = asking.asked
        assert device.figures().allocated == first.size + 1024 and late.size == 1024
        statistics, segments = device.statistics(), device.segments({})
        other, _ = self.made()
        blocks = [other.allocate(5_000_000), other.allocate(1000)]
        other.reset_peak()
        other.empty_cache()
        assert statistics == other.statistics()
        assert [
            (each.address % PER_DEVICE, each.size, each.requested) for each in (first, late)
        ] == [(each.address % PER_DEVICE, each.size, each.requested) for each in blocks]
        assert [each.stream for each in segments] == [each.stream for each in other.segments({})]

    def test_it_is_freed_before_it_has_a_place(self) -> None:
        device, asking = self.made()
        asking.size = 3_000_000
        first = device.allocate(5_000_000)
        device.freed.append(asking.asked[0])
        assert device.figures().allocated == first.size
        device.freed.append(first)
        device.empty_cache()
        assert device.figures().reserved == device.figures().allocated == 0

    def test_an_interrupt_comes_too(self) -> None:
        device, asking = self.made()
        asking.size = 3_000_000
        device.live = lambda device: asking.asked

        class Interrupting:
            def segment_changed(self, *change: Any) -> None:
                raise KeyboardInterrupt

        device.observers.append(Interrupting())  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            device.allocate(5_000_000)
        assert device.figures().allocated == device.figures().reserved == asking.asked[0].size
        device.freed.append(asking.asked[0])
        device.live = tuple
        assert device.figures().allocated == 0
