"""Repeats everything and watches for what a process keeps: ``python -m benchmarks --soak``.

Each turn enters and leaves scopes on the CPU and on simulated devices with both engines, trains,
moves tensors and modules, starts threads, runs out of simulated memory, raises errors through
scopes, and calls code that was made for the turn, as in a notebook. Two threads are in scopes of
different kinds, of which one enters and leaves them again and again; the turns go through all pairs
of kinds.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import torch

import torchdevice
from benchmarks import pairs_of_scopes
from torchdevice.errors import FidelityError
from torchdevice.scope.scope import Scope

_SECONDS_A_PAIR = 0.5

_SAMPLES = 120
"""How many samples are taken over the whole time."""


class Sample(NamedTuple):
    """What the process had at a time.

    Attributes:
        minutes: Since the first turn.
        turns: How many turns were made.
        resident: Bytes of memory.
        objects: Objects that Python's garbage collector knows.
        descriptors: Open file descriptors; on Windows, handles.
    """

    minutes: float
    turns: int
    resident: int
    objects: int
    descriptors: int


def run(minutes: float, show: Callable[[str], None] = print) -> list[Sample]:
    """Take turns for so many minutes, and print a line for each sample."""
    lasting = torchdevice.portable("cpu")
    turn, began = 0, time.monotonic()
    _turn(lasting, turn)  # what is made once for the process is made now
    samples: list[Sample] = []
    show("minutes    turns    MiB resident    objects    descriptors")
    while True:
        passed = (time.monotonic() - began) / 60
        if not samples or passed >= minutes * len(samples) / _SAMPLES:
            samples.append(_sample(passed, turn))
            _, _, resident, *counts = samples[-1]
            show(
                "{:7.2f} {:8d} {:15.1f} {:10d} {:14d}".format(
                    passed, turn, resident / 2**20, *counts
                )
            )
        if passed >= minutes:
            return samples
        turn += 1
        _turn(lasting, turn)


def summary(samples: list[Sample]) -> str:
    """Return what grew from the first quarter of the time to its end."""
    early, late = samples[len(samples) // 4], samples[-1]
    resident, objects, descriptors = (late[field] - early[field] for field in range(2, 5))
    return (
        f"{late.turns} turns in {late.minutes:.1f} minutes. In the last {late.turns - early.turns} "
        "turns: "
        f"{resident:+,} bytes, {objects:+,} objects, {descriptors:+d} descriptors."
    )


def _sample(minutes: float, turns: int) -> Sample:
    gc.collect()
    process = psutil.Process()
    descriptors = process.num_handles() if sys.platform == "win32" else process.num_fds()
    return Sample(minutes, turns, process.memory_info().rss, len(gc.get_objects()), descriptors)


def _turn(lasting: Scope, number: int) -> None:
    for scope in (
        lasting,
        torchdevice.portable("cpu"),
        torchdevice.portable("cpu", engine="wrap"),
        torchdevice.simulate(count=2, memory="64MiB"),
        torchdevice.simulate(engine="wrap", memory="64MiB"),
    ):
        with scope, scope:
            _train()
            _move()
            _start_threads()
            _made_for_the_turn(number)
        _raise_through(scope)
        _leave_a_generator(scope)
    for engine in ("mode", "wrap"):
        _run_out_of_memory(torchdevice.simulate(engine=engine, memory="1MiB"))
        _degrade(torchdevice.portable("cpu", engine=engine, strict=True))
    pairs = list(itertools.product(pairs_of_scopes.kinds(), repeat=2))
    pairs_of_scopes.run(*pairs[number % len(pairs)], seconds=_SECONDS_A_PAIR)


def _train() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("cuda"):
            loss = model(torch.randn(4, 8, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _move() -> None:
    x = torch.ones(16).pin_memory().to("cuda", non_blocking=True)
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        y = x.clone().cpu()
        event.record()
    event.synchronize()
    x.to(x.device)
    y.cuda()
    torch.cuda.memory_stats()


def _start_threads() -> None:
    threads = [threading.Thread(target=_train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _made_for_the_turn(number: int) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(
        compile(
            "def made():\n    return torch.ones(1, device='cuda')",
            f"<ipython-input-{number}>",
            "exec",
        ),
        names,
    )
    names["made"]()


def _raise_through(scope: Scope) -> None:
    try:
        with scope:
            torch.ones(3, device="cuda") + torch.ones(4, device="cuda")
    except RuntimeError:
        return
    raise AssertionError("tensors of different sizes were added")


def _leave_a_generator(scope: Scope) -> None:
    @scope
    def steps() -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1, device="cuda")

    next(steps())  # never finished


def _run_out_of_memory(scope: Scope) -> None:
    with scope:
        try:
            torch.empty(10_000_000, device="cuda")
        except torch.cuda.OutOfMemoryError:
            return
    raise AssertionError("40 MB fit into 1 MiB")


def _degrade(scope: Scope) -> None:
    with scope:
        try:
            torch.cuda.utilization()
        except FidelityError:
            return
    raise AssertionError("a strict scope invented a figure")
