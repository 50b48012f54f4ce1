"""Runs public CUDA programs, unmodified, without a GPU: ``python -m benchmarks.programs``.

Each program of ``catalog/`` is checked out at its commit and runs in processes of its own: by plain
python in its own CPU mode, if it has one, and by ``torchdevice run`` on each target. The results
are written to ``results.json``, of which the site makes a page; a run replaces that of the same
program, target and release of torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.programs import page
from benchmarks.programs.catalog import PROGRAMS
from benchmarks.programs.program import OWN, Program
from benchmarks.programs.runs import Run, check_out, run

RESULTS = Path(__file__).with_name("results.json")


def record(runs: Iterable[Run]) -> list[Run]:
    """Replace recorded runs of the same programs, targets and torch, and return all records.

    Runs of programs that are not in the catalog any more are left out.
    """
    known = [Run(**each) for each in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    latest = {each[:3]: each for each in [*known, *runs]}
    names = [program.name for program in PROGRAMS]
    kept = sorted(
        (each for each in latest.values() if each.name in names),
        key=lambda each: (names.index(each.name), each.torch, each.target != OWN, each.target),
    )
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(each._asdict()) for each in kept) + "\n]\n")
    return kept


def _targets(program: Program, wanted: Sequence[str]) -> list[str]:
    own = [] if program.own is None else [OWN]
    return [target for target in [*own, *program.targets] if not wanted or target in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the programs, and return 1 if one failed and the catalog does not say why."""
    options = _parser().parse_args(argv)
    chosen = [
        each
        for each in PROGRAMS
        if not options.only or any(part in each.name for part in options.only)
    ]
    if not chosen:
        print(
            f"no program of the catalog is called {options.only!r}; --list shows them",
            file=sys.stderr,
        )
        return 2
    if options.list:
        print("\n".join(f"{each.area}: {each.name} ({each.repository})" for each in chosen))
        return 0
    if options.keep is None:
        with tempfile.TemporaryDirectory() as folder:
            return _run(chosen, Path(folder), options)
    options.keep.mkdir(parents=True, exist_ok=True)
    return _run(chosen, options.keep.resolve(), options)


def _run(chosen: Sequence[Program], folder: Path, options: argparse.Namespace) -> int:
    unexplained = 0
    programs = {program.name: program for program in chosen}

    def runs_of(number: int) -> list[Run]:
        program = chosen[number]
        checkout = folder / f"{number}-{program.repository.rpartition('/')[2]}"
        shutil.rmtree(checkout, ignore_errors=True)
        check_out(program, checkout, options.sources, options.python)
        targets = _targets(program, options.target)
        return [run(program, target, options.python, checkout, options.limit) for target in targets]

    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(runs_of, number) for number in range(len(chosen))]
        for finished in as_completed(running):
            for done in finished.result():
                print(
                    f"{done.name} on {done.target}: {done.outcome} {done.loss} {done.result} "
                    f"{done.error}",
                    flush=True,
                )
                unexplained += done.outcome != "finished" and not page.fault(
                    programs[done.name], done
                )
            # After each program, because an interrupt must not lose an hour's work.
            if options.write:
                record(finished.result())
    return int(unexplained > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only programs whose name contains one of these"
    )
    parser.add_argument(
        "--target", nargs="+", metavar="TARGET", help=f"only these targets; {OWN!r} is plain python"
    )
    parser.add_argument(
        "--sources",
        type=Path,
        help="a folder with bare git directories named owner+name/repo, instead of GitHub",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="the python of an environment with what the programs need",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep checkouts and what was printed there"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="programs that run at the same time (default: 1)"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds for a run (default: 600)")
    parser.add_argument(
        "--list", action="store_true", help="print the names of the programs, and run nothing"
    )
    parser.add_argument("--write", action="store_true", help="write results.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
