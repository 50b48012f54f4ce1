"""The cost of entering and leaving, of importing the package, and of size; the memory of a journal."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from time import perf_counter_ns

import torch

import torchdevice
from benchmarks.measuring import Timing, timing


def entering(rounds: int) -> dict[str, Timing]:
    """Return microseconds of entering and leaving, outermost and nested, and of a decorated empty function."""

    def of(call: Callable[[], object], number: int) -> Timing:
        return timing(_microseconds(call, number, rounds))

    def enter(target: str) -> Callable[[], None]:
        def run() -> None:
            with torchdevice.portable(target):
                pass

        run()
        return run

    @torchdevice.portable("cpu")
    def empty() -> None:
        pass

    empty()
    found = {f"outermost, {target}": of(enter(target), 50) for target in ("cpu", "simulated")}
    found["decorated empty function, outermost"] = of(empty, 50)
    with torchdevice.portable("cpu") as scope:

        def again() -> None:
            with scope:
                pass

        found["nested, the same scope"] = of(again, 2000)
        found["decorated empty function, nested"] = of(empty, 2000)
    return found


def importing(rounds: int) -> Timing:
    """Return the microseconds that importing the package adds to importing torch."""
    program = (
        "import sys, time, torch\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] == 'torchdevice']: del sys.modules[name]\n"
        "start = time.perf_counter_ns(); import torchdevice\n"
        "print((time.perf_counter_ns() - start) / 1000)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
        times = [
            float(subprocess.check_output([sys.executable, "-c", program], text=True, env=environment))
            for _ in range(1 + max(3, rounds))
        ]
    return timing(times[1:])  # without the first, which compiles the modules to bytecode


def journal_bytes(interceptions: int) -> tuple[int, int]:
    """Return the bytes of a journal after a thousand interceptions and after ``interceptions``."""
    with torchdevice.portable("cpu") as scope:
        tracemalloc.start()
        for _ in range(1000):
            scope._resolved().redirect("cuda")
        early = tracemalloc.get_traced_memory()[0]
        redirect = scope._resolved().redirect
        tracemalloc.stop()
        before = _size_of(scope.journal)
        for _ in range(interceptions):
            redirect("cuda")
        after = _size_of(scope.journal)
    return early, early + after - before


def _size_of(journal: torchdevice.Journal) -> int:
    return sum(sys.getsizeof(value) for value in vars(journal).values())


def growth() -> dict[str, dict[int, float]]:
    """Return the microseconds of one call for growing numbers of call sites, scopes, threads and parameters.

    Returns:
        Name of the curve -> size -> microseconds of one call.
    """
    return {
        "call sites": {n: _with_call_sites(n) for n in (1, 10, 100, 1000)},
        "nesting": {n: _nested(n) for n in (1, 5, 20, 50)},
        "threads": {n: _threads(n) for n in (1, 4, 16, 64)},
        "parameters": {n: _parameters(n) for n in (1, 100, 1000, 10_000)},
    }


def _median(call: Callable[[], object], number: int, rounds: int = 7) -> float:
    return statistics.median(_microseconds(call, number, rounds))


def _microseconds(call: Callable[[], object], number: int, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = perf_counter_ns()
        for _ in range(number):
            call()
        times.append((perf_counter_ns() - start) / number / 1000)
    return times


def _with_call_sites(count: int) -> float:
    """Return the microseconds of a factory that is called from ``count`` lines in turn."""
    body = "\n".join("    torch.zeros(1, device='cuda')" for _ in range(count))
    names: dict[str, Callable[[], object]] = {}
    exec(f"import torch\ndef run():\n{body}", names)
    with torchdevice.portable("cpu"):
        names["run"]()
        return _median(names["run"], max(1, 1000 // count)) / count


def _nested(depth: int) -> float:
    """Return the microseconds of an ordinary operator inside ``depth`` nested scopes."""
    import contextlib

    x = torch.ones(4)
    with contextlib.ExitStack() as stack:
        for _ in range(depth):
            stack.enter_context(torchdevice.portable("cpu"))
        return _median(lambda: torch.add(x, x), 2000)


def _threads(count: int) -> float:
    """Return the microseconds of starting and joining one of ``count`` threads that each make a tensor."""
    import threading

    def start() -> None:
        threads = [threading.Thread(target=torch.zeros, args=(1,), kwargs={"device": "cuda"}) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with torchdevice.portable("cpu"):
        start()
        return _median(start, 3) / count


def _parameters(count: int) -> float:
    """Return the microseconds per parameter of moving a module with ``count`` parameters."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(count)])
    with torchdevice.portable("cpu"):
        return _median(lambda: module.to("cuda"), max(1, 1000 // count), 3) / count
