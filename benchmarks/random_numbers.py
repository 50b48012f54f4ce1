"""The cost of a GPU's random numbers on a CPU, by C++ and NumPy, against torch's own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

import torchdevice
from benchmarks.measuring import Timing, compare
from benchmarks.progress import track
from torchdevice.native import building

PLAIN = "torch's CPU"

COUNTS = (10_000, 100_000, 1_000_000)

_Call = Callable[[], object]


def _filling(
    name: str, *args: float, dtype: torch.dtype = torch.float32
) -> Callable[[str, int], _Call]:
    def prepare(device: str, count: int) -> _Call:
        fill = getattr(torch.empty(count, dtype=dtype, device=device), name)
        return lambda: fill(*args)

    return prepare


def _of_ones(function: Callable[[torch.Tensor], object]) -> Callable[[str, int], _Call]:
    def prepare(device: str, count: int) -> _Call:
        x = torch.ones(count, device=device)
        return lambda: function(x)

    return prepare


CASES: dict[str, Callable[[str, int], _Call]] = {
    "uniform_": _filling("uniform_"),
    "uniform_(-1, 1)": _filling("uniform_", -1.0, 1.0),
    "uniform_, float64": _filling("uniform_", dtype=torch.float64),
    "uniform_, float16": _filling("uniform_", dtype=torch.float16),
    "normal_": _filling("normal_"),
    "normal_(1, 2)": _filling("normal_", 1.0, 2.0),
    "normal_, float64": _filling("normal_", dtype=torch.float64),
    "normal_, bfloat16": _filling("normal_", dtype=torch.bfloat16),
    "random_, int64": _filling("random_", dtype=torch.int64),
    "random_(100), int64": _filling("random_", 100, dtype=torch.int64),
    "exponential_": _filling("exponential_"),
    "cauchy_": _filling("cauchy_"),
    "geometric_": _filling("geometric_", 0.3),
    "log_normal_": _filling("log_normal_"),
    "bernoulli_": _filling("bernoulli_", 0.3),
    "bernoulli": _of_ones(torch.bernoulli),
    "dropout": _of_ones(torch.nn.functional.dropout),
    "randperm": lambda device, count: lambda: torch.randperm(count, device=device),
}
"""Name -> function of a device and a number of elements that returns the call to measure."""


def measure(rounds: int, only: str = "") -> dict[str, dict[str, Timing]]:
    """Return name and number of elements -> condition -> processor time of a call."""
    scopes: dict[str, Any] = {PLAIN: contextlib.nullcontext()}
    if building.is_built():
        scopes["C++"] = torchdevice.simulate(random="cuda", native="always", engine="wrap")
    scopes["Python"] = torchdevice.simulate(random="cuda", native="never", engine="wrap")
    names = [(name, count) for name in CASES for count in COUNTS if only in name]
    found = {}
    for name, count in track(names, "random numbers"):
        calls = {}
        for condition, scope in scopes.items():
            with scope:
                calls[condition] = CASES[name]("cpu" if condition == PLAIN else "cuda", count)
        conditions = {condition: lambda scope=scope: scope for condition, scope in scopes.items()}
        found[f"{name}, {count:,}"] = compare(
            conditions, calls, rounds=rounds, clock=time.process_time_ns
        )
    return found


def table(measured: dict[str, dict[str, Timing]]) -> str:
    """Return a table in Markdown: nanoseconds a number, and ratios to torch's CPU."""
    conditions = list(next(iter(measured.values()), {PLAIN: None}))
    lines = [f"| ns a number | {' | '.join(conditions)} |", "|---" * (len(conditions) + 1) + "|"]
    for name, timings in measured.items():
        count = int(name.rpartition(", ")[2].replace(",", ""))
        cells = [f"{timing.median / count * 1000:.1f}" for timing in timings.values()]
        ratios = [
            "",
            *(f" ({timings[each].median / timings[PLAIN].median:.1f})" for each in conditions[1:]),
        ]
        lines.append(f"| {name} | {' | '.join(map(''.join, zip(cells, ratios, strict=True)))} |")
    return "\n".join(lines)
