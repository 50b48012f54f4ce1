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


def _of_ones(
    function: Callable[[torch.Tensor], object], dtype: torch.dtype = torch.float32
) -> Callable[[str, int], _Call]:
    def prepare(device: str, count: int) -> _Call:
        x = torch.ones(count, dtype=dtype, device=device)
        return lambda: function(x)

    return prepare


def _multinomial(replacement: bool) -> Callable[[str, int], _Call]:
    def prepare(device: str, count: int) -> _Call:
        chances = torch.ones(100, device=device)
        rows = chances.expand(count // 100, 100).contiguous()
        return lambda: torch.multinomial(rows, 100, replacement)

    return prepare


_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_FILLED: dict[str, tuple[str, tuple[float, ...]]] = {
    "uniform_": ("uniform_", ()),
    "uniform_(-1, 1)": ("uniform_", (-1.0, 1.0)),
    "normal_": ("normal_", ()),
    "normal_(1, 2)": ("normal_", (1.0, 2.0)),
    "exponential_": ("exponential_", ()),
    "cauchy_": ("cauchy_", ()),
    "geometric_": ("geometric_", (0.3,)),
    "log_normal_": ("log_normal_", ()),
    "bernoulli_": ("bernoulli_", (0.3,)),
    "random_": ("random_", ()),
}

CASES: dict[str, Callable[[str, int], _Call]] = {
    **{
        f"{name}, {str(dtype).removeprefix('torch.')}": _filling(method, *args, dtype=dtype)
        for name, (method, args) in _FILLED.items()
        for dtype in _FLOATING
    },
    "random_, int64": _filling("random_", dtype=torch.int64),
    "random_(100), int64": _filling("random_", 100, dtype=torch.int64),
    "random_(100), int32": _filling("random_", 100, dtype=torch.int32),
    "random_(2**40), int64": _filling("random_", 2**40, dtype=torch.int64),
    "rand": lambda device, count: lambda: torch.rand(count, device=device),
    "randn": lambda device, count: lambda: torch.randn(count, device=device),
    "randint": lambda device, count: lambda: torch.randint(100, (count,), device=device),
    **{
        f"{name}, {str(dtype).removeprefix('torch.')}": _of_ones(function, dtype)
        for name, function in (
            ("bernoulli", torch.bernoulli),
            ("dropout", torch.nn.functional.dropout),
        )
        for dtype in _FLOATING
    },
    "randperm": lambda device, count: lambda: torch.randperm(count, device=device),
    "multinomial, with replacement": _multinomial(True),
    "multinomial, without": _multinomial(False),
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
