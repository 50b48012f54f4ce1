"""Compiled code must not give the answers of another scope: it is guarded by all options."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import FidelityError

pytestmark = pytest.mark.one_engine

ENGINES = ["mode", "wrap"]


def count() -> int:
    return torch.cuda.device_count()


def capability() -> int:
    return torch.cuda.get_device_capability()[0]


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def is_mac() -> int:
    return 1 if torch.backends.mps.is_available() else 2


def is_on_cuda() -> int:
    return 1 if torch.ones(1, device="cuda").is_cuda else 2


def width_of_double() -> int:
    return torch.zeros(1, device="cuda").double().itemsize


CASES: dict[str, tuple[Callable[[], int], list[tuple[dict[str, Any], int]]]] = {
    "count": (count, [({"count": 4}, 4), ({"count": 1}, 1), ({"count": 4}, 4), ({"count": 2}, 2)]),
    "capability": (capability, [({"capability": (9, 0)}, 9), ({}, 8), ({"capability": (9, 0)}, 9)]),
    "properties": (
        processors,
        [({"properties": {"multi_processor_count": n}}, n) for n in (7, 9, 7)],
    ),
    "written_for": (is_mac, [({"written_for": "mps"}, 1), ({}, 2), ({"written_for": "mps"}, 1)]),
    "identity": (is_on_cuda, [({}, 1), ({"identity": "target"}, 2), ({"identity": "program"}, 1)]),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_each_scope_gets_its_own_answer(case: str, engine: str, backend: str) -> None:
    ask, scopes = CASES[case]
    compiled = torch.compile(lambda x: x + ask(), backend=backend)
    for options, expected in scopes:
        with torchdevice.simulate(**options, engine=engine):
            assert compiled(torch.zeros(1)).item() == ask() == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_each_scope_gets_its_own_answer_for_float64(engine: str) -> None:
    compiled = torch.compile(
        lambda: torch.zeros(2, dtype=torch.float64, device="cuda"), backend="eager"
    )
    for _ in range(2):
        with (
            torchdevice.simulate("mps", float64="float32", engine=engine),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", torchdevice.errors.PortabilityWarning)
            assert compiled().dtype is torch.float32
        with torchdevice.simulate("mps", float64="error", engine=engine):
            with pytest.raises(TypeError, match="doesn't support float64"):
                compiled()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_number_of_visible_devices(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(lambda x: x + torch.cuda.device_count(), backend="eager")
    for visible, expected in (("0,1,2", 3), ("0", 1), ("0,1,2", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with torchdevice.simulate(count=4, engine=engine):
            assert compiled(torch.zeros(1)).item() == expected


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", ["outside", "inside"])
def test_code_of_a_scope_does_not_run_outside_nor_the_reverse(
    target: str, engine: str, first: str
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.cuda() + 1 if torch.cuda.is_available() else x - 1

    compiled = torch.compile(program, backend="eager")
    for place in ["outside", "inside", "outside", "inside"][first == "inside" :]:
        if place == "outside":
            assert compiled(torch.zeros(1)).item() == -1
        else:
            with torchdevice.portable(target, engine=engine):
                assert compiled(torch.zeros(1)).item() == 1


@pytest.mark.xfail(
    torch.__version__ < "2.13",
    strict=True,
    reason="torch guards on attributes of a threading.local since 2.13",
)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_current_device_is_that_of_the_call(engine: str) -> None:
    compiled = torch.compile(lambda n: torch.zeros(n, device="cuda") + 1, backend="eager")
    with torchdevice.simulate(count=3, engine=engine):
        for index in (0, 1, 2, 1, 0):
            with torch.cuda.device(index):
                assert compiled(3).get_device() == index


@pytest.mark.parametrize("engine", ENGINES)
def test_an_ordinal_serves_every_current_device(engine: str) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda n: torch.zeros(n, device="cuda:1") + 1, backend=counter)
    with torchdevice.simulate(count=3, engine=engine):
        for index in (0, 1, 2):
            with torch.cuda.device(index):
                assert compiled(3).get_device() == 1
    assert counter.frame_count == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_strict_is_strict_in_compiled_code(engine: str, fullgraph: bool) -> None:
    def in_half(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return a @ a

    # A copy of the code, because Dynamo does not try again to compile code on which it failed once.
    own = types.FunctionType(in_half.__code__.replace(), globals(), "in_half")
    program = torch.compile(own, backend="eager", fullgraph=fullgraph)
    a = torch.ones(2, 2)
    with torchdevice.portable("cpu", autocast="bfloat16", engine=engine):
        assert program(a).dtype is torch.bfloat16
    refusal = torch._dynamo.exc.Unsupported if fullgraph else FidelityError
    with torchdevice.portable("cpu", strict=True, autocast="bfloat16", engine=engine):
        with pytest.raises(refusal, match=r"autocast\(torch.float16\) would not be exact here"):
            program(a)
    with torchdevice.portable("cpu", autocast="bfloat16", engine=engine):
        assert program(a).dtype is torch.bfloat16


@pytest.mark.parametrize("engine", ENGINES)
def test_scopes_with_the_same_options_share_the_code(target: str, engine: str) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(
        lambda n: torch.ones(n, device="cuda") + torch.cuda.device_count(), backend=counter
    )
    for _ in range(12):
        with torchdevice.portable(target, engine=engine):
            assert compiled(2).sum().item() == 4
    assert counter.frame_count == 1
