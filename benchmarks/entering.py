"""The cost of entering and leaving a scope, and of importing the package."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter_ns

import torchdevice
from benchmarks.measuring import Timing, timing


def entering(rounds: int) -> dict[str, Timing]:
    """Return microseconds of entering and leaving, outer, nested, and for an empty function."""

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
    """Return the microseconds that the package's import and first use add to torch's import."""
    program = (
        "import sys, time, torch\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] == 'torchdevice']: del "
        "sys.modules[name]\n"
        "start = time.process_time_ns(); import torchdevice; torchdevice.portable\n"
        "print((time.process_time_ns() - start) / 1000)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
        times = [
            float(
                subprocess.check_output([sys.executable, "-c", program], text=True, env=environment)
            )
            for _ in range(1 + max(3, rounds))
        ]
    return timing(times[1:])  # without the first, which compiles the modules to bytecode


def _microseconds(call: Callable[[], object], number: int, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = perf_counter_ns()
        for _ in range(number):
            call()
        times.append((perf_counter_ns() - start) / number / 1000)
    return times
