"""Calls that ``engine="wrap"`` makes without the mode do what the mode does."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counted_frames import frames_of
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice
from torchdevice.calls import moves
from torchdevice.kernel import thread_state

pytestmark = pytest.mark.one_engine

ENGINES = ("mode", "wrap")


SCOPES: dict[str, Callable[..., torchdevice.Scope]] = {
    "cpu": functools.partial(torchdevice.portable, "cpu"),
    "several": functools.partial(torchdevice.portable, "cpu", devices=2),
    "simulated": functools.partial(torchdevice.simulate, count=2),
    "of a Mac": functools.partial(torchdevice.simulate, "mps", written_for="mps"),
}


def scopes(chosen: str) -> list[torchdevice.Scope]:
    """Return the scope with the mode and the one with wrappers."""
    return [SCOPES[chosen](engine=engine) for engine in ENGINES]


class Own(torch.Tensor):
    """A tensor of the program's own class."""


class Size:
    """A size that fails."""

    def __index__(self) -> int:
        raise LookupError("no size")


def _of(device: Any) -> dict[str, Callable[[], Any]]:
    host = torch.ones(2, 3)
    return {
        "zeros": lambda: torch.zeros(4, device=device),
        "sizes": lambda: torch.zeros((2, 3), device=device, dtype=torch.int32),
        "no argument": lambda: torch.empty(size=(2,), device=device).fill_(1),
        "arange": lambda: torch.arange(1, 4, device=device),
        "a range of numbers": lambda: torch.linspace(
            0.0, 1.0, 3, device=device, requires_grad=True
        ),
        "data": lambda: torch.tensor([1.0, 2.0], device=device),
        "pinned": lambda: torch.zeros(2, device=device, pin_memory=True),
        "into": lambda: torch.zeros(4, out=torch.ones(4), device=device),
        "of no device": lambda: torch.zeros(4, device=None),
        "by default": lambda: torch.zeros(4),
        "by default, of data": lambda: torch.tensor([1.0]),
        "alike by default": lambda: torch.zeros_like(host.to(device)),
        "new by default": lambda: host.to(device).new_ones(2),
        "by default of a class": lambda: torch.ones_like(host.as_subclass(Own)),
        "itself": lambda: torch.as_tensor(host),
        "wrong by default": lambda: torch.zeros(-1),
        "pinned by default": lambda: torch.zeros(2, pin_memory=True),
        "of another": lambda: torch.zeros(4, device="meta"),
        "alike": lambda: torch.zeros_like(host, device=device),
        "new": lambda: host.new_zeros((2,), device=device),
        "wrong size": lambda: torch.zeros(-1, device=device),
        "wrong argument": lambda: torch.zeros("4", device=device),
        "wrong keyword": lambda: torch.zeros(4, device=device, colour=1),
        "an error of the program's": lambda: torch.zeros((Size(),), device=device),
        "moved": lambda: host.to(device),
        "moved again": lambda: host.to(device).to(device),
        "moved by keyword": lambda: host.to(device=device),
        "moved with a dtype": lambda: host.to(device, torch.float16),
        "a parameter moved": lambda: torch.nn.Parameter(host).to(device),
        "a leaf moved": lambda: torch.ones(2, requires_grad=True).to(device),
        "of a class moved": lambda: host.as_subclass(Own).to(device),
        "sparse": lambda: torch.eye(2).to_sparse().to(device),
        "method of the class": lambda: torch.Tensor.to(host, device),
        "nothing moved": lambda: torch.Tensor.to(),
        "no tensor moved": lambda: torch.Tensor.to(1, device),  # type: ignore[arg-type]
        "cuda()": lambda: host.cuda().cuda(),
        "cuda() of nothing": lambda: torch.Tensor.cuda(),  # type: ignore[call-arg]
        "cuda() of a device": lambda: host.cuda(device),
        "there and back": lambda: torch.ones(2, device=device).cpu(),
        "a device": lambda: torch.device(device),
        "by a wrong name": lambda: torch.zeros(2, device="nonsense"),
        "a device of a wrong name": lambda: torch.device("nonsense"),
        "a module": lambda: torch.nn.Linear(2, 2, device=device).weight,
        "under vmap": lambda: torch.func.vmap(lambda x: x + torch.zeros(3, device=device))(
            torch.ones(2, 3).to(device)
        ),
        "under grad": lambda: torch.func.grad(
            lambda x: (x * torch.ones(3, device=device).to(device)).sum()
        )(torch.ones(3, device=device)),
    }


REFUSED = (
    "wrong argument",
    "wrong keyword",
    "an error of the program's",
    "nothing moved",
    "no tensor moved",
    "cuda() of nothing",
)
"""Calls of which torch refuses the arguments, before it asks a mode. A wrapper is asked before
that.
"""


DEVICES: dict[str, Callable[[], Any]] = {
    "text": lambda: "cuda",
    "ordinal": lambda: "cuda:0",
    "second": lambda: "cuda:1",
    "number": lambda: 0,
    "device": lambda: torch.device("cuda"),
    "another device": lambda: torch.zeros(1, device="cuda").device,
}


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a program sees of a call's result or error."""
    try:
        result = call()
    except Exception as error:
        return type(error), str(error), type(error.__context__)
    if not isinstance(result, torch.Tensor):
        return result
    of_result = (
        type(result),
        result.device,
        result.dtype,
        result.shape,
        result.requires_grad,
        result.layout,
    )
    return (*of_result, moves.side_of(result), result.is_leaf)


def counted(scope: torchdevice.Scope) -> list[Any]:
    return [
        (each.site, each.library, each.requested, each.done, each.count)
        for each in scope.journal.entries
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in _of("cpu") if name not in REFUSED])
@pytest.mark.parametrize("chosen", [*SCOPES])
def test_a_call_does_what_the_mode_does(chosen: str, name: str) -> None:
    seen = []
    for scope in scopes(chosen):
        with scope:
            results = []
            for find in DEVICES.values():
                try:
                    device = find()
                except Exception as error:  # there is no such device
                    results.append(repr(error))
                    continue
                call = _of(device)[name]
                results += [outcome(call) for _ in range(3)]
        seen.append((results, counted(scope)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("chosen", [*SCOPES])
def test_a_refused_call_leaves_the_scope_as_it_is(chosen: str, name: str) -> None:
    with SCOPES[chosen](engine="wrap"):
        calls = _of("mps" if chosen == "of a Mac" else "cuda")
        errors = [outcome(calls[name])[0] for _ in range(3)]
        assert errors == [errors[0]] * 3 and issubclass(errors[0], Exception)
        assert thread_state.state.mode is not None and outcome(calls["zeros"])[0] is torch.Tensor


FRAMES: dict[str, tuple[int, Callable[[torch.Tensor, torch.device], Any]]] = {
    "text": (6, lambda x, device: torch.zeros(4, device="cuda")),
    "device": (6, lambda x, device: torch.ones(4, device=device)),
    "keywords": (6, lambda x, device: torch.arange(4, device="cuda", dtype=torch.int32)),
    "move": (5, lambda x, device: x.to("cuda")),
    "move to a device": (6, lambda x, device: x.to(device)),
    "method": (6, lambda x, device: x.cuda()),
    "constructor": (3, lambda x, device: torch.device("cuda")),
}
"""A call -> the most frames of Python that it takes on a CPU target, of a device that the thread
has named before.
"""


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("name", [*FRAMES])
def test_few_frames_of_python_are_needed(name: str) -> None:
    most, call = FRAMES[name]
    with torchdevice.portable("cpu", engine="wrap"):
        x, device = torch.ones(2, device="cuda"), torch.device("cuda")
        for _ in range(5):
            call(x, device)
        frames = frames_of(functools.partial(call, x, device))
    assert 1 < len(frames) <= most + 1, frames  # with the call's own


def test_what_a_program_gives_stays_as_it_was() -> None:
    options = {"device": "cuda"}
    with torchdevice.portable("cpu", engine="wrap"):
        partial = functools.partial(torch.zeros, **options)  # type: ignore[arg-type]
        for _ in range(3):
            torch.zeros(2, **options)  # type: ignore[call-overload]
            partial(2)
            list(map(partial, (1, 2)))
            assert options == partial.keywords == {"device": "cuda"}
            with pytest.raises(RuntimeError):
                partial(-1)
            assert partial.keywords == {"device": "cuda"}


class TestMarks:
    """A storage that a wrapper has marked is the device's."""

    @pytest.fixture(autouse=True)
    def scope(self) -> Iterator[torchdevice.Scope]:
        with torchdevice.portable("cpu", engine="wrap") as scope:
            torch.zeros(2, device="cuda")
            yield scope

    def made(self) -> torch.Tensor:
        return torch.zeros(2, device="cuda")

    @pytest.mark.parametrize("side", [moves.Side.HOST, moves.Side.UNKNOWN])
    def test_another_mark_takes_its_place(self, side: moves.Side) -> None:
        x = self.made()
        assert (
            moves.side_of(x) is moves.side_of(x[0]) is moves.side_of(x.clone()) is moves.Side.DEVICE
        )
        assert x.cuda() is x and x.to("cuda", non_blocking=True) is x and x.cpu() is not x
        moves.mark_storage(x.untyped_storage(), side)
        assert x.cuda() is not x and x.to("cuda") is not x
        moves.mark(x, moves.Side.DEVICE)
        assert x.cuda() is x.to("cuda") is x

    def test_a_module_that_is_moved_takes_its_memory_along(self) -> None:
        layer = torch.nn.Linear(2, 2, device="cuda")
        weight, address = layer.weight, layer.weight.data_ptr()
        layer.cpu()
        assert layer.weight is weight and weight.data_ptr() == address
        assert weight.cpu() is weight and weight.detach().cuda() is not weight
        assert moves.side_of(weight) is moves.Side.HOST

    def test_a_default_device_marks_too(self) -> None:
        torch.set_default_device("cuda")
        try:
            made = torch.zeros(2)
        finally:
            torch.set_default_device(None)
        assert moves.side_of(made) is moves.Side.DEVICE and made.cuda() is made

    def test_memory_that_is_used_again_has_no_mark(self) -> None:
        for _ in range(100):
            self.made()
            assert moves.side_of(torch.zeros(2).cos()) is None

    @pytest.mark.usefixtures("no_collections")
    def test_a_marked_tensor_is_pickled_and_shared_between_processes(self) -> None:
        x = self.made()
        assert pickle.loads(pickle.dumps(x)).tolist() == [0.0, 0.0]
        x.share_memory_()
        process = multiprocessing.get_context("fork").Process(target=x.fill_, args=(3,))
        process.start()
        process.join()
        assert x.tolist() == [3.0, 3.0]


class TestWhoseCallsTheyAre:
    """A wrapper asks at each call what the thread's scope is."""

    def test_threads(self) -> None:
        """A thread without a scope gets torch's errors, others their own scopes' devices."""
        seen: dict[str, Any] = {}
        entered, done = threading.Event(), threading.Event()

        def outside() -> None:
            entered.wait()
            seen["outside"] = outcome(lambda: torch.zeros(1, device="cuda"))
            seen["device"] = torch.device("cuda").type
            seen["moved"] = outcome(lambda: torch.ones(1).cuda())
            done.set()

        def inside() -> None:
            with torchdevice.simulate(engine="wrap"):
                seen["simulated"] = {str(torch.zeros(1, device="cuda").device) for _ in range(50)}

        others = [threading.Thread(target=outside)]
        others[0].start()
        expected = outcome(lambda: torch.zeros(1, device="cuda"))
        with torchdevice.portable("cpu", engine="wrap") as scope:
            inherited = [
                threading.Thread(target=lambda: [torch.zeros(1, device="cuda") for _ in range(50)])
            ]
            others += [threading.Thread(target=inside) for _ in range(4)]
            for each in (*inherited, *others[1:]):
                each.start()
            entered.set()
            assert {torch.zeros(1, device="cuda").device.type for _ in range(50)} == {"cpu"}
            for each in (*inherited, *others):
                each.join()
        assert (
            seen["outside"] == expected
            and seen["device"] == "cuda"
            and seen["moved"][0] is expected[0]
        )
        assert seen["simulated"] == {"cuda:0"} and done.is_set()
        assert sum(entry.count for entry in scope.journal.entries) == 100

    def test_another_current_device_and_the_cpu(self) -> None:
        with torchdevice.simulate(count=2, engine="wrap"):
            for _ in range(3):
                x = torch.zeros(1, device="cuda")
                for index in (1, 0):
                    torch.cuda.set_device(index)
                    assert (
                        torch.zeros(1, device="cuda").device.index == x.cuda().device.index == index
                    )
                    assert (
                        x.to("cuda").device.index
                        == torch.zeros(1, device=torch.device("cuda")).device.index
                        == index
                    )
            torch.device("cpu:-1")
            assert torch.zeros(1, device="cuda").device.type == x.cuda().device.type == "cpu"

    def test_many_devices_of_one_name_are_counted_where_they_were_named(self) -> None:
        with torchdevice.simulate(count=2, engine="wrap") as scope:
            for turn in range(6000):
                torch.cuda.set_device(turn % 2)
                torch.device("cuda:0"), torch.empty(1, device="cuda")
        assert sum(each.count for each in scope.journal.entries if each.requested == "cuda") == 6000

    def test_a_call_that_leaves_the_scope(self) -> None:
        scope = torchdevice.portable("cpu", engine="wrap")

        class Leaves(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                scope.__exit__(None, None, None)
                return func(*args, **(kwargs or {}))

        scope.__enter__()
        x = torch.zeros(2, device="cuda")
        with Leaves():
            torch.empty(2, device="cuda")
        assert thread_state.state.mode is None and torch.device("cuda").type == "cuda"
        with scope:
            assert x.cuda() is x

    def test_modes_that_served_are_collected(self) -> None:
        def modes() -> int:
            gc.collect()
            return sum(isinstance(each, thread_state.ContextMode) for each in gc.get_objects())

        before = modes()
        for _ in range(5):
            with torchdevice.portable("cpu", engine="wrap"):
                torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
        assert modes() <= before + 1


def test_a_forked_process_counts_its_own_calls() -> None:
    with torchdevice.portable("cpu", engine="wrap") as scope:

        def call() -> None:
            for _ in range(3):
                torch.zeros(1, device="cuda")

        def forked(results: Any) -> None:
            scope.journal.clear()
            call()
            results.put(sum(each.count for each in scope.journal.entries))

        call()
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        process = context.Process(target=forked, args=(results,))
        process.start()
        assert results.get() == 3
        process.join()
        assert sum(each.count for each in scope.journal.entries) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_dynamo_sees_the_same(engine: Any, fresh_dynamo: None) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (
            x.to("cuda")
            + torch.zeros(4, device="cuda")
            + torch.ones(4, device=torch.device("cuda")).cuda()
        )

    compiled = torch.compile(program, fullgraph=True, backend="eager")
    for enter in (functools.partial(torchdevice.portable, "cpu"), torchdevice.simulate):
        with enter(engine=engine):
            for _ in range(3):
                x = torch.ones(4, device="cuda")
                assert torch.equal(compiled(x), program(x))
