"""``python -m benchmarks``: measures what scopes cost, in one process, and prints a table.

``--json FILE`` also writes the figures to a file. Other measurements instead:

- ``--instructions``: the machine instructions of five calls, by valgrind's callgrind; these counts
  are reproducible.
- ``--peers [WAY ...]``: other ways to run a CUDA program on a CPU, against a program edited by
  hand.
- ``--growth``: time and memory of one call, call site, thread, parameter and so on, at growing
  numbers of them.
- ``--soak [--minutes 60]``: what a process keeps that does everything again and again.
- ``--simulation``: the simulated device with both kinds of kernels, against the plain CPU, in
  processor time.
- ``--transfers``: moves by ``ToDevice``, against a bare ``.to``.
- ``--verify``: scopes with ``verify=``, against scopes without it.
- ``--half``: half precision on a CPU, against float32.
- ``--packages``: stand-ins for packages, against the same mathematics by torch's operators.
- ``--half-operators``: every operator in half precision on a simulated GPU, against float32.
- ``--random``: a GPU's random numbers by C++ and by NumPy, against torch's own on a CPU, in
  nanoseconds a number.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import cases, entering, facade, growth, instructions, peers, plotting, soak
from benchmarks.measuring import Timing, compare
from benchmarks.progress import track


def main() -> int:
    """Run the command."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.counted is not None:
        return instructions.calls_to_count(options.counted)
    if options.instructions:
        return instructions.count(options.only)
    figures = _measurement(options)(options.rounds, options.only)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure what scopes cost."
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="measurements of each condition (default: 15)"
    )
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--plot", type=Path, help="draw what --growth or --soak measured into this SVG file"
    )
    parser.add_argument(
        "--most", type=int, help="leave out what is measured at more than this many"
    )
    parser.add_argument("--counted", help=argparse.SUPPRESS)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--instructions",
        action="store_true",
        help="count machine instructions with callgrind instead",
    )
    what.add_argument(
        "--growth",
        action="store_true",
        help="measure growing numbers of what programs have instead",
    )
    what.add_argument(
        "--soak",
        action="store_true",
        help="watch a process that does everything again and again instead",
    )
    parser.add_argument(
        "--minutes", type=float, default=60, help="for how long --soak runs (default: 60)"
    )
    what.add_argument(
        "--simulation", action="store_true", help="measure the simulated device instead"
    )
    what.add_argument("--transfers", action="store_true", help="measure moves by ToDevice instead")
    what.add_argument("--half", action="store_true", help="measure half precision on a CPU instead")
    what.add_argument(
        "--half-operators",
        action="store_true",
        help="measure every operator in half precision on a simulated GPU instead",
    )
    what.add_argument("--verify", action="store_true", help="measure what verify costs instead")
    what.add_argument("--packages", action="store_true", help="measure stand-ins instead")
    what.add_argument(
        "--random", action="store_true", help="measure a GPU's random numbers instead"
    )
    ways = (
        f"measure other ways to run a CUDA program on a CPU instead: {', '.join(peers.WAYS)} "
        "(default: all)"
    )
    what.add_argument("--peers", nargs="*", choices=peers.WAYS, metavar="WAY", help=ways)
    source = "the folder with a peer's package, instead of PyPI"
    parser.add_argument(
        "--peer-source",
        type=_source,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help=source,
    )
    repeats = "processes that measure each way of --peers (default: 3)"
    parser.add_argument("--peer-repeats", type=int, default=3, help=repeats)
    return parser


def _source(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if name not in peers.PEERS or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=FOLDER with a name of {', '.join(peers.PEERS)}"
        )
    return name, str(Path(folder).resolve())


def _measurement(options: argparse.Namespace) -> Callable[[int, str], dict[str, Any]]:
    if options.peers is not None:
        return lambda rounds, only: _measure_peers(options, rounds, only)
    if options.growth:
        return lambda rounds, only: _measure_growth(options, only)
    if options.soak:
        return lambda rounds, only: _soak(options)
    parts = {
        _measure_simulation: options.simulation,
        _measure_transfers: options.transfers,
        _measure_half: options.half,
        _measure_half_operators: options.half_operators,
        _measure_verify: options.verify,
        _measure_random: options.random,
        _measure_packages: options.packages,
    }
    return next((part for part, chosen in parts.items() if chosen), _measure)


def _measure_peers(options: argparse.Namespace, rounds: int, only: str) -> dict[str, Any]:
    sources = dict(options.peer_source)
    measured = peers.measure(
        options.peers, sources, rounds=rounds, only=only, repeats=options.peer_repeats
    )
    print(peers.table(measured, only))
    return {"torch": torch.__version__, "peers": measured}


def _measure_growth(options: argparse.Namespace, only: str) -> dict[str, Any]:
    curves = growth.measure(only, options.most)
    print(growth.table(curves))
    if options.plot:
        options.plot.write_text(plotting.growth(curves))
    return {"torch": torch.__version__, "growth": curves}


def _soak(options: argparse.Namespace) -> dict[str, Any]:
    samples = soak.run(options.minutes)
    print(soak.summary(samples))
    if options.plot:
        options.plot.write_text(plotting.soak(samples))
    return {"torch": torch.__version__, "soak": samples}


def _measure_simulation(rounds: int, only: str) -> dict[str, Any]:
    from benchmarks import simulation

    figures = {**_heading(rounds), "simulation": simulation.measure(rounds, only)}
    for name, timings in figures["simulation"].items():
        _print(name, timings, simulation.PLAIN)
    return figures


def _heading(rounds: int) -> dict[str, Any]:
    """Print the versions and the units of the measurement, and return the versions."""
    print(
        f"torch {torch.__version__}, one thread, microseconds: median of {rounds} interleaved "
        "rounds [quartiles]\n"
    )
    return {"torch": torch.__version__, "python": sys.version.split()[0]}


def _measure_random(rounds: int, only: str) -> dict[str, Any]:
    from benchmarks import random_numbers

    measured = random_numbers.measure(rounds, only)
    print(random_numbers.table(measured))
    return {"torch": torch.__version__, "random": measured}


def _measure_packages(rounds: int, only: str) -> dict[str, Any]:
    from benchmarks import package_speed

    figures = {**_heading(rounds), "packages": package_speed.measure(rounds, only)}
    for name, timings in figures["packages"].items():
        _print(name, timings, package_speed.BY_TORCH)
    return figures


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


def _measure_half_operators(rounds: int, only: str) -> dict[str, Any]:
    from benchmarks import half_operators

    measured = half_operators.measure(only)
    print(half_operators.table(measured))
    ratios = {
        name: {str(dtype): each.ratio(dtype) for dtype in half_operators.HALVES}
        for name, each in measured.items()
    }
    return {"torch": torch.__version__, "half operators": ratios}


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
    return figures


def _case(case: cases.Case, rounds: int) -> dict[str, Timing]:
    prepared: dict[str, Any] = {}
    conditions = {name: cases.CONDITIONS[name] for name in case.conditions}
    for name, condition in conditions.items():
        with condition():
            prepared[name] = case.prepare(cases.named_device(name))
    return compare(
        conditions, prepared, rounds=min(rounds, case.rounds or rounds), seconds=case.seconds
    )


def _cell(timing: Timing) -> str:
    return f"{timing.median:10.2f} [{timing.lower:.2f} {timing.upper:.2f}]"


def _print(name: str, timings: dict[str, Timing], against: str) -> None:
    print(name)
    base = timings[against].median
    for condition, timing in timings.items():
        print(f"    {condition:22} {_cell(timing):36} {timing.median / base:6.3f} x {against}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
