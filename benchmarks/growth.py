"""Growth with calls, call sites, scopes, threads, parameters, ranks: ``benchmarks --growth``.

Each curve has the time of one and the memory that is kept for one, at several sizes up to those of
large programs.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

import torchdevice
from benchmarks.progress import track


class Point(NamedTuple):
    """One size of a curve.

    Attributes:
        microseconds: The processor time of one.
        blocks: The blocks of Python's memory that are kept for one, after the first time.
        bytes: By how much the process grew for one, after the first time.
    """

    microseconds: float
    blocks: float
    bytes: float


def measure(only: str, most: int | None) -> dict[str, dict[int, Point]]:
    """Measure the curves named with ``only``, up to size ``most``: name -> size -> point."""
    chosen = {name: curve for name, curve in CURVES.items() if only in name}
    sizes = [(name, n) for name, (ns, _) in chosen.items() for n in ns if most is None or n <= most]
    found: dict[str, dict[int, Point]] = {}
    for name, n in track(sizes, "sizes"):
        found.setdefault(name, {})[n] = chosen[name][1](n)
    return found


def table(curves: dict[str, dict[int, Point]]) -> str:
    """Return the curves as a table in Markdown."""
    lines = [
        "| | how many | microseconds of one | blocks kept for one | bytes kept for one |",
        "|---|---|---|---|---|",
    ]
    for name, curve in curves.items():
        for n, point in curve.items():
            kept = f"{point.blocks:.2f} | {point.bytes:.0f}"
            lines.append(f"| {name} | {n:,} | {point.microseconds:.2f} | {kept} |")
    return "\n".join(lines)


def _point(call: Callable[[], object], units: int, rounds: int = 3) -> Point:
    """Measure a call of ``units``: memory from before its first run, time without that run."""
    gc.collect()
    process = psutil.Process()
    before, resident = sys.getallocatedblocks(), process.memory_info().rss
    call()
    gc.collect()
    blocks, grown = sys.getallocatedblocks() - before, process.memory_info().rss - resident
    return Point(_microseconds(call, units, rounds), blocks / units, grown / units)


def _microseconds(call: Callable[[], object], units: int, rounds: int) -> float:
    """Return a unit's median processor time. Short calls repeat, for a thousand units a round."""
    number = max(1, 1000 // units)
    times = []
    for _ in range(rounds):
        start = time.process_time_ns()
        for _ in range(number):
            call()
        times.append((time.process_time_ns() - start) / number / units / 1000)
    return statistics.median(times)


def _calls(count: int) -> Point:
    """Make ``count`` rewritten calls at one line."""

    def run() -> None:
        for _ in range(count):
            torch.device("cuda")

    with torchdevice.portable("cpu"):
        torch.device("cuda")
        return _point(run, count, rounds=1)


def _program_of(lines: int) -> Callable[[], object]:
    """Return a function with a rewritten call on each of so many lines, a hundred per function."""
    rows = ["    torch.device('cuda')"] * lines
    parts = ["\n".join(rows[start : start + 100]) for start in range(0, lines, 100)]
    text = "".join(f"def part{number}():\n{part}\n" for number, part in enumerate(parts))
    names: dict[str, Any] = {"torch": torch}
    exec(compile(text, str(Path(__file__).with_name("made.py")), "exec"), names)
    functions = [names[f"part{number}"] for number in range(len(parts))]
    return lambda: [function() for function in functions]


def _call_sites(count: int) -> Point:
    """Make a rewritten call at each of ``count`` lines. The journal keeps 10,000 of them."""
    run = _program_of(count)
    with torchdevice.portable("cpu"):
        torch.device("cuda")
        return _point(run, count)


def _nested(depth: int) -> Point:
    """Enter ``depth`` nested scopes, and leave them."""
    scope = torchdevice.portable("cpu")

    def run() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(scope)

    with scope:
        return _point(run, depth)


def _threads(count: int) -> Point:
    """Start ``count`` simultaneous threads, each of which makes a tensor, and join them."""

    def run() -> None:
        together = threading.Barrier(count)

        def make() -> None:
            torch.zeros(1, device="cuda")
            together.wait()

        threads = [threading.Thread(target=make) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with torchdevice.portable("cpu"):
        torch.zeros(1, device="cuda")
        return _point(run, count)


def _parameters(count: int) -> Point:
    """Move a module of ``count`` parameters."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(count)])
    with torchdevice.portable("cpu"):
        torch.nn.Linear(1, 1).to("cuda")
        return _point(lambda: module.to("cuda"), count)


_REDUCED = 200
"""How many times the ranks reduce a tensor."""


def _ranks(count: int) -> Point:
    """Reduce a tensor over ``count`` NCCL ranks: time and memory of one reduction in one rank.

    Both contain gloo's own, and torch's records of the last operations of a group.
    """
    forking = multiprocessing.get_context("fork")
    results: Any = forking.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            forking.Process(target=_rank, args=(rank, count, folder, results))
            for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        points = [results.get() for _ in ranks]
        for rank in ranks:
            rank.join()
    return Point(*map(statistics.mean, zip(*points, strict=True)))


def _rank(rank: int, count: int, folder: str, results: Any) -> None:
    """Run one rank, and put its figures into ``results``."""
    with torchdevice.portable("cpu"):
        rendezvous = f"file://{folder}/rendezvous"
        torch.distributed.init_process_group(
            "nccl", init_method=rendezvous, rank=rank, world_size=count
        )
        x = torch.ones(4, device="cuda")
        torch.distributed.all_reduce(x)
        process = psutil.Process()
        gc.collect()
        blocks, resident = sys.getallocatedblocks(), process.memory_info().rss
        start = time.process_time()
        for _ in range(_REDUCED):
            torch.distributed.all_reduce(x)
        seconds = time.process_time() - start
        gc.collect()
        blocks, grown = sys.getallocatedblocks() - blocks, process.memory_info().rss - resident
        results.put((seconds * 1e6 / _REDUCED, blocks / _REDUCED, grown / _REDUCED))
        torch.distributed.destroy_process_group()


CURVES: dict[str, tuple[tuple[int, ...], Callable[[int], Point]]] = {
    # First, because a process that has had threads should not fork.
    "ranks": ((1, 2, 4, 8), _ranks),
    "rewritten calls": ((1000, 10_000, 100_000, 1_000_000, 10_000_000), _calls),
    "call sites": ((1, 10, 100, 1000, 10_000, 100_000), _call_sites),
    "nested scopes": ((1, 5, 20, 50), _nested),
    "threads": ((1, 4, 16, 64, 256), _threads),
    "parameters": ((1, 100, 1000, 10_000, 100_000), _parameters),
}
"""Name -> sizes, and what measures one size."""
