"""The cost of the simulated device, against the plain CPU in one process. Needs the [hf] extra.

Each case runs on the CPU, on a simulated device with the kernels in C++ where these are built, and
on one with the kernels in Python. The times are processor times.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import torchdevice
from benchmarks import small_programs, workloads
from benchmarks.measuring import Timing, compare
from benchmarks.progress import track
from torchdevice.native import building

PLAIN, NATIVE, PYTHON = "CPU", "simulated, native", "simulated, Python"


class Case(NamedTuple):
    """A call to time.

    Attributes:
        name: The name in the table.
        prepare: Called with a device type; makes tensors there and returns the call.
        seconds: The approximate duration of one measurement.
    """

    name: str
    prepare: Callable[[str], Callable[[], Any]]
    seconds: float = 0.02


def _operator(function: Callable[..., Any], *shape: int) -> Callable[[str], Callable[[], Any]]:
    """Return the ``prepare`` of a call of a function of a tensor of ones of this shape."""

    def prepare(device: str) -> Callable[[], Any]:
        x = torch.ones(*shape).to(device)
        return lambda: function(x)

    return prepare


def _products(size: int) -> Case:
    return Case(f"matmul, {size} x {size}", _operator(lambda x: x @ x, size, size), 0.06)


def _backward(device: str) -> Callable[[], Any]:
    x = torch.ones(16).to(device).requires_grad_()

    def run() -> None:
        (x * x + x).sum().backward()
        x.grad = None

    return run


CASES = (
    Case("x + x, 4 elements", _operator(lambda x: x + x, 4)),
    Case("x.add_(1)", _operator(lambda x: x.add_(1), 4)),
    Case("x.view(2, 2)", _operator(lambda x: x.view(2, 2), 4)),
    Case("x[0]", _operator(lambda x: x[0], 4)),
    Case("x.item()", _operator(lambda x: x.item(), 1)),
    Case("x.device", _operator(lambda x: x.device, 4)),
    Case("zeros", lambda device: functools.partial(torch.zeros, 4, device=device)),
    Case("arange", lambda device: functools.partial(torch.arange, 4, device=device)),
    Case("dropout, 128 elements", _operator(lambda x: torch.nn.functional.dropout(x, 0.1), 128)),
    Case("attention, 4 heads of 16 x 16", workloads.attention),
    *map(_products, (64, 512, 1024)),
    Case("(x * x + x).sum().backward(), 16 elements", _backward),
    Case("training step of a transformer layer", workloads.training_step(64, 1, 16), 0.1),
    Case("training step of a tiny GPT-2", small_programs.step_of_gpt2, 0.1),
    Case("PPO: a rollout of 32 steps and two epochs", small_programs.ppo, 0.1),
    Case(
        "generate by transformers, 20 tokens of a tiny GPT-2",
        small_programs.generate_by_transformers,
        0.2,
    ),
    Case("generate as nanoGPT does, 20 tokens", small_programs.generate_as_nanogpt, 0.1),
)


def conditions() -> dict[str, Any]:
    """Return the conditions; those with kernels in C++ are missing where these are not built."""
    ways = {NATIVE: "always", PYTHON: "never"} if building.is_built() else {PYTHON: "never"}
    scopes = {
        name: torchdevice.simulate(engine="wrap", memory="8GiB", native=way)
        for name, way in ways.items()
    }
    return {
        PLAIN: contextlib.nullcontext,
        **{name: functools.partial(_same, scopes[name]) for name in scopes},
    }


def _same(scope: Any) -> Any:
    return scope


def measure(rounds: int, only: str = "") -> dict[str, dict[str, Timing]]:
    """Return times on the CPU and on simulated devices for each case named with ``only``."""
    chosen = [case for case in CASES if only in case.name]
    return {case.name: _timings(case, conditions(), rounds) for case in track(chosen, "cases")}


def _timings(case: Case, under: dict[str, Any], rounds: int) -> dict[str, Timing]:
    calls = {}
    for name, condition in under.items():
        with condition():
            calls[name] = case.prepare("cpu" if name == PLAIN else "cuda")
    return compare(under, calls, rounds=rounds, seconds=case.seconds, clock=time.process_time_ns)
