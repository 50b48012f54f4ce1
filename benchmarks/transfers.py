"""The cost of a move by ``ToDevice`` against a bare ``.to`` of the tensor, in equal conditions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

import torchdevice
from benchmarks.measuring import Condition, Timing, compare
from benchmarks.progress import track

BARE, OBJECT = "x.to(device)", "ToDevice"

SIZES = {"4 elements": 4, "4 MB": 1 << 20, "32 MB": 1 << 23}

WAYS: dict[str, tuple[Condition, str, str]] = {
    "no scope, nothing moves": (contextlib.nullcontext, "cpu", "cpu"),
    "cpu target, to the device": (lambda: torchdevice.portable("cpu"), "cpu", "cuda:0"),
    "cpu target, wrap, to the device": (
        lambda: torchdevice.portable("cpu", engine="wrap"),
        "cpu",
        "cuda:0",
    ),
    "simulated, to the device": (lambda: torchdevice.simulate(count=2), "cpu", "cuda:0"),
    "simulated, to the host": (lambda: torchdevice.simulate(count=2), "cuda:0", "cpu"),
    "simulated, to another device": (lambda: torchdevice.simulate(count=2), "cuda:0", "cuda:1"),
}
"""Name -> what is in force, and from where to where."""


def measure(rounds: int, only: str = "") -> dict[str, dict[str, Timing]]:
    """Return, for each way and size whose name contains ``only``, the times of both."""
    names = [name for way in WAYS for size in SIZES if only in (name := f"{way}, {size}")]
    return {name: _timings(name, rounds) for name in track(names, "ways")}


def _timings(name: str, rounds: int) -> dict[str, Timing]:
    way, _, size = name.rpartition(", ")
    condition, source, target = WAYS[way]
    with condition():
        calls = _calls(source, target, SIZES[size])
        return compare(dict.fromkeys(calls, contextlib.nullcontext), calls, rounds=rounds)


def _calls(source: str, target: str, elements: int) -> dict[str, Callable[[], object]]:
    x, device = torch.ones(elements, device=source), torch.device(target)
    move = torchdevice.ToDevice(source, target)
    return {BARE: lambda: x.to(device), OBJECT: lambda: move(x)}
