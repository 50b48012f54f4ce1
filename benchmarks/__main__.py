"""``python -m benchmarks``: measures what scopes cost, in one process, and prints a table.

``--json FILE`` also writes the figures to a file. ``--instructions`` instead counts the machine instructions of four
calls with valgrind's callgrind; these counts are reproducible. ``--simulation`` instead measures the simulated device
against the plain CPU, ``--transfers`` moves by ``ToDevice`` against a bare ``.to``, ``--half`` half precision on a CPU
against float32, ``--verify`` scopes with ``verify=`` against scopes without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, entering, facade
from benchmarks.measuring import Timing, compare
from benchmarks.progress import track


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what scopes cost.")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each condition (default: 15)")
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the growth curves into this SVG file")
    parser.add_argument("--instructions", action="store_true", help="count machine instructions with callgrind instead")
    parser.add_argument("--simulation", action="store_true", help="measure the simulated device instead")
    parser.add_argument("--transfers", action="store_true", help="measure moves by ToDevice instead")
    parser.add_argument("--half", action="store_true", help="measure half precision on a CPU instead")
    parser.add_argument("--verify", action="store_true", help="measure what verify costs instead")
    parser.add_argument("--counted", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.counted is not None:
        return _counted(options.counted)
    if options.instructions:
        return _instructions(options.only)
    parts = {
        _measure_simulation: options.simulation,
        _measure_transfers: options.transfers,
        _measure_half: options.half,
        _measure_verify: options.verify,
    }
    measure = next((part for part, chosen in parts.items() if chosen), _measure)
    figures = measure(options.rounds, options.only)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    if options.plot and "growth" in figures:
        options.plot.write_text(_drawn(figures["growth"]))
    return 0


def _measure_simulation(rounds: int, only: str) -> dict[str, Any]:
    from benchmarks import simulation

    figures = {**_heading(rounds), "simulation": simulation.measure(rounds, only)}
    for name, timings in figures["simulation"].items():
        _print(name, timings, simulation.PLAIN)
    return figures


def _heading(rounds: int) -> dict[str, Any]:
    """Print the versions and the units of the measurement, and return the versions."""
    print(f"torch {torch.__version__}, one thread, microseconds: median of {rounds} interleaved rounds [quartiles]\n")
    return {"torch": torch.__version__, "python": sys.version.split()[0]}


def _measure_transfers(rounds: int, only: str) -> dict[str, Any]:
    from benchmarks import transfers

    figures = {**_heading(rounds), "transfers": transfers.measure(rounds, only)}
    for name, timings in figures["transfers"].items():
        _print(name, timings, transfers.BARE)
    return figures


def _measure_half(rounds: int, only: str) -> dict[str, Any]:
    from benchmarks import half_precision

    figures = {**_heading(rounds), "half precision": half_precision.measure(rounds, only)}
    for name, timings in figures["half precision"].items():
        _print(name, timings, half_precision.FLOAT32)
    return figures


def _measure_verify(rounds: int, only: str) -> dict[str, Any]:
    from benchmarks import verify

    figures = {**_heading(rounds), "verify": verify.measure(rounds, only)}
    for name, timings in figures["verify"].items():
        _print(name, timings, verify.WITHOUT)
    return figures


def _measure(rounds: int, only: str) -> dict[str, Any]:
    figures = _heading(rounds)
    figures["cases"] = {}
    for case in track([case for case in cases.CASES if only in case.name], "cases"):
        timings = _case(case, rounds)
        figures["cases"][case.name] = timings
        _print(case.name, timings, cases.NOTHING)
    if only in "torch.cuda facade":
        figures["facade"] = facade.measure(rounds)
        for name, timings in figures["facade"].items():
            _print(name, timings, "torch's own Python")
    if only in "entering importing":
        figures["entering"] = {**entering.entering(rounds), "import": entering.importing(3)}
        for name, timing in figures["entering"].items():
            print(f"{name:42} {_cell(timing)}")
    if only in "growth":
        figures["growth"] = entering.growth()
        for name, curve in figures["growth"].items():
            print(f"{name:42} " + "  ".join(f"{size}: {time:.2f}" for size, time in curve.items()))
    if only in "journal":
        figures["journal bytes"] = dict(zip(("1e3", "1e7"), entering.journal_bytes(10_000_000), strict=True))
        print(f"journal bytes after 1e3 and 1e7 interceptions  {figures['journal bytes']}")
    return figures


def _case(case: cases.Case, rounds: int) -> dict[str, Timing]:
    prepared: dict[str, Any] = {}
    conditions = {name: cases.CONDITIONS[name] for name in case.conditions}
    for name, condition in conditions.items():
        with condition():
            prepared[name] = case.prepare(name)
    return compare(conditions, prepared, rounds=min(rounds, case.rounds or rounds), seconds=case.seconds)


def _cell(timing: Timing) -> str:
    return f"{timing.median:10.2f} [{timing.lower:.2f} {timing.upper:.2f}]"


def _print(name: str, timings: dict[str, Timing], against: str) -> None:
    print(name)
    base = timings[against].median
    for condition, timing in timings.items():
        print(f"    {condition:22} {_cell(timing):36} {timing.median / base:6.3f} x {against}")


# ---- instructions ----------------------------------------------------------------------------------------------------

_COUNTED = (
    "ordinary operator, 4 elements",
    "factory with a device",
    "x.to(device), nothing moves",
    "torch.device(...)",
)
_CONDITIONS = (cases.BARE, cases.NOTHING, cases.CONTEXT, cases.CPU, cases.WRAPPED)


_CALLS = 200

_mark, _MARK = threading.get_native_id, "PyThread_get_thread_native_id"
"""A Python function, and the C function that it calls. At each call callgrind writes its counts and resets them."""


def _counted(only: str) -> int:
    """Make the calls that callgrind counts, between marks, all in one process."""
    # Until here valgrind only translated, because it takes a minute to count the import of torch.
    begin = subprocess.Popen(["callgrind_control", "--instr=on", str(os.getpid())], stdout=subprocess.DEVNULL)
    while begin.poll() is None:  # valgrind hears the command only while the process runs
        pass
    if begin.returncode:
        return begin.returncode
    for case in _cases_counted(only):
        for condition in _CONDITIONS:
            with cases.CONDITIONS[condition]():
                call = case.prepare(condition)
                for _ in range(50):
                    call()
                _mark()
                for _ in range(_CALLS):
                    call()
                _mark()
    return 0


def _cases_counted(only: str) -> list[cases.Case]:
    return [case for case in cases.CASES if case.name in _COUNTED and only in case.name]


def _instructions(only: str) -> int:
    if shutil.which("valgrind") is None:
        print("valgrind is not installed. Install it to count instructions, or measure times.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        watched = [sys.executable, "-m", "benchmarks", "--counted", only]
        options = ["--instr-atstart=no", f"--dump-before={_MARK}", f"--callgrind-out-file={folder}/out"]
        subprocess.run(["valgrind", "--tool=callgrind", *options, *watched], check=True, stderr=subprocess.DEVNULL)
        print(f"{'instructions of one call':34}" + "".join(f"{condition:>20}" for condition in _CONDITIONS))
        counted = _cases_counted(only)
        marks = 2 * len(counted) * len(_CONDITIONS)  # ours are the last; starting threads calls the C function too
        last = len(list(Path(folder).glob("out.*")))
        numbers = iter(range(last - marks + 2, last + 1, 2))  # the second file of each pair counts the calls
        for case in counted:
            counts = [_summary(Path(f"{folder}/out.{next(numbers)}")) / _CALLS for _ in _CONDITIONS]
            print(f"{case.name:34}" + "".join(f"{count:20,.0f}" for count in counts))
    return 0


def _summary(part: Path) -> int:
    """Return the number of instructions in an output file of callgrind."""
    found = re.search(r"^(?:summary|totals): (\d+)", part.read_text(), re.MULTILINE)
    assert found, f"{part} has no summary"
    return int(found[1])


# ---- the plot --------------------------------------------------------------------------------------------------------


def _drawn(curves: dict[str, dict[int, float]]) -> str:
    """Return an SVG with the curves of :func:`entering.growth`: microseconds against size, both logarithmic."""
    import math

    width, height, margin = 640, 360, 50
    colours = ("#1b6ca8", "#c8553d", "#588b4c", "#7d5ba6")
    most = max(size for curve in curves.values() for size in curve)
    highest = max(time for curve in curves.values() for time in curve.values())
    lines = []
    for colour, (name, curve) in zip(colours, curves.items(), strict=True):
        points = [
            (
                margin + (width - 2 * margin) * math.log10(size) / math.log10(most),
                height - margin - (height - 2 * margin) * math.log10(1 + time) / math.log10(1 + highest),
            )
            for size, time in curve.items()
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        x, y = points[-1]
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{x - 60:.0f}" y="{y - 8:.0f}" fill="{colour}">{name}</text>')
    axes = f'<path d="M{margin},{margin} V{height - margin} H{width - margin}" fill="none" stroke="#444"/>'
    text = f'<text x="{margin}" y="{height - 15}">how many, 1 to {most} (logarithmic)</text>'
    unit = f'<text x="{margin}" y="{margin - 15}">microseconds of one, up to {highest:.0f} (logarithmic)</text>'
    body = "".join([axes, text, unit, *lines])
    style = "font-family='sans-serif' font-size='12'"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>{body}</svg>\n'


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
