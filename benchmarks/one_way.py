"""The cost of one way to run a CUDA program on a CPU, in one process: ``benchmarks.one_way WAY``.

Packages that do the same work patch torch for the rest of the process. So the program that was
edited by hand for the CPU is measured first, then the way is put in force, then the program that
says ``cuda`` is measured. Prints the results as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

EDITED, CONTEXT = "edited by hand", "with torch.device"
OURS = {"torchdevice, mode": "mode", "torchdevice, wrap": "wrap"}


class Case(NamedTuple):
    """A workload of :mod:`benchmarks.workloads`.

    Attributes:
        workload: Finds it in the module, which imports torch, and so is imported later.
        seconds: The approximate duration of one measurement.
        rounds: The greatest number of measurements.
    """

    workload: Callable[[Any], Callable[[str], Callable[[], object]]]
    seconds: float = 0.02
    rounds: int = 15


CASES = {
    "ordinary operator": Case(lambda module: module.add),
    "factory": Case(lambda module: module.factory),
    "move": Case(lambda module: module.no_move),
    "training step": Case(lambda module: module.training_step(32, 2, 16), 0.1, 7),
    "generate": Case(lambda module: module.generate, 0.1, 5),
}
"""Name in the table -> what is measured, besides the import."""


def main() -> int:
    """Measure a way and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", help="the module to import, or one of this package's ways")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="measure only this one"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # peers print when they are imported
        results = measure(options.way, options.case or list(CASES), options.rounds)
    print(json.dumps(results))
    return 0


def measure(way: str, cases: list[str], rounds: int) -> dict[str, Any]:
    """Measure a way.

    Returns:
        Case -> ratio to the program edited by hand, and ``import``, the processor time of importing
        torch and of putting the way in force, as a ratio to importing torch alone. A case that
        raised has the text of the error; then ``CASE, cpu`` is the ratio of the program that says
        ``cpu``. Only ``error`` if the way cannot be had.
    """
    start = time.process_time()
    import torch

    imported = time.process_time()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        return {"error": "this machine has CUDA, so the program runs on it as it is"}
    try:
        edited = {name: _timed(CASES[name], "cpu", rounds) for name in cases}
        before = time.process_time()
        _put_in_force(way)
    except Exception as error:
        return {"error": _text(error)}
    results: dict[str, Any] = {"import": 1 + (time.process_time() - before) / (imported - start)}
    for name in cases:
        results |= _compared(name, edited[name], rounds, "cpu" if way == EDITED else "cuda")
    return results


def _compared(name: str, edited: float, rounds: int, device: str) -> dict[str, Any]:
    try:
        return {name: _timed(CASES[name], device, rounds) / edited}
    except Exception as error:
        failed = {name: _text(error)}
    with contextlib.suppress(Exception):
        failed[f"{name}, cpu"] = _timed(CASES[name], "cpu", rounds) / edited  # type: ignore[assignment]
    return failed


def _put_in_force(way: str) -> None:
    if way in OURS:
        import torchdevice

        torchdevice.enable("cpu", engine=OURS[way])
    elif way == CONTEXT:
        import torch

        torch.device("cpu").__enter__()
    elif way != EDITED:
        importlib.import_module(way)


def _timed(case: Case, device: str, rounds: int) -> float:
    """Return a call's processor time in seconds: the minimum, as other work only adds to it."""
    from benchmarks import workloads

    call = case.workload(workloads)(device)
    call()
    number = max(1, int(case.seconds / _seconds(call, 1)))
    return min(_seconds(call, number) for _ in range(min(rounds, case.rounds)))


def _seconds(call: Callable[[], object], number: int) -> float:
    start = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - start) / number


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition('. ')[0].partition(chr(10))[0]}"


if __name__ == "__main__":
    sys.exit(main())
