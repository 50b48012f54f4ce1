"""The Pythons and torch builds on which the package works: ``benchmarks.platforms PYTHON...``.

Each PYTHON is an interpreter in whose environment torch and the tests' dependencies are installed.
``--make FOLDER`` makes such environments first, by default one for each supported Python and each
release of torch. A small part of the suite runs in each, against this checkout, or with ``--whole``
the default run, and the table shows how it went. ``--join FILE...`` puts the rows together that
several machines wrote with ``--rows FILE``, as the workflow does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.progress import track

ROOT = Path(__file__).parent.parent

PAGE = ROOT / "docs" / "platforms.md"

FIGURES = ROOT / "benchmarks" / "platforms.json"
"""The latest run in each environment with each engine, of which the page is made."""

TESTS = tuple(
    f"tests/{name}.py"
    for name in (
        "core/test_scope",
        "cuda/test_torch_cuda",
        "torch_apis/test_amp",
        "torch_apis/test_data",
    )
)
"""The part of the suite: scopes, ``torch.cuda``, mixed precision, loading of files and data."""

ENVIRONMENTS = (
    "3.10:2.10.0",
    "3.11:2.11.0",
    "3.12:2.12.1",
    "3.11:2.13.0",
    "3.13:2.14.1",
    "3.13:2.15.0",
)
"""Every supported Python and every release of torch, the oldest with the oldest and the newest with
the newest.
"""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

HEADER = """# Where it has run

Each row is a run of the tests with one Python and one torch, on a machine without an accelerator. The workflow
`.github/workflows/platforms.yml` makes the rows every week, and opens a pull request with the page. A row with a
failure is an open defect. By hand:

```sh
python -m benchmarks.platforms --write PYTHON...                        # a part of the suite with each interpreter
python -m benchmarks.platforms --make build/platforms --whole --write   # the default run, an environment for each pair
```

The part is {tests}. `--whole` takes what `pytest -n auto` runs, `--engine both`
both engines. `--make` makes an environment for every supported Python and every release of torch. The Pythons must be
on the path. `--environments 3.12:2.12.0` chooses. `--index https://pypi.org/simple` takes torch's CUDA builds in place
of its CPU builds. A run replaces the row of the same environment and engine. The seconds depend on the machine.

"""

FOOTER = """
For each change `.ci/run` takes README's commands with torch 2.13.0's CPU build and with the torch that pip chooses, and
the tests on both engines. {missing}
On an NVIDIA H200 with torch 2.11 and Python 3.12 ran [the cases and questions](simulation.md) by which the simulation
is compared with a GPU, and the tests of programs that are written for MPS. Ten of the twelve passed. Two failed
because their process had a simulated device ([why](simulation.md#what-stays-in-the-process)); a training step written
for MPS ran in a process without one. Nothing has run on Apple MPS, on Intel XPU, on macOS or on Windows. The runtime
of MPS runs on [a simulated Mac](mps.md), the others are tested against torch's signatures, with recorded calls.
Workflows for macOS with MPS, for Windows and for torch's newest build stand in `.github/workflows`; none of them has
run yet.
`pytest --pyargs torchdevice_selftest` runs the core of the contract tests on the device of `TORCHDEVICE_TARGET`.
"""


class Row(NamedTuple):
    """How the tests went in one environment, on one engine."""

    python: str
    torch: str
    engine: str = ""
    ran: str = "nothing"
    date: str = ""
    passed: int = 0
    failed: Sequence[str] = ()
    skipped: Mapping[str, int] = {}
    """How many tests were left out, by reason."""
    seconds: float = 0.0
    system: str = ""


def run(interpreter: str, tests: Sequence[str], engine: str, ran: str) -> Row:
    """Run tests with an interpreter, in this checkout.

    Args:
        interpreter: The interpreter of an environment.
        tests: Files of tests and flags of pytest.
        engine: The engine of scopes that name none.
        ran: What the tests are of the suite: "the default run" or "a part".
    """
    versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
    try:
        found = subprocess.run(
            [interpreter, "-c", versions], capture_output=True, text=True, check=True
        )
    except OSError as error:
        return Row(interpreter, f"cannot be started: {error.strerror}")
    except subprocess.CalledProcessError as error:
        return Row(interpreter, f"cannot be imported: {error.stderr.splitlines()[-1]}")
    python, torch = found.stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        words = [
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={results}",
            "--engine",
            engine,
            *tests,
        ]
        subprocess.run(
            [interpreter, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if not results.exists():
            return Row(python, f"{torch}: pytest did not run")
        (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    return Row(
        python, torch, engine, ran, datetime.date.today().isoformat(), *_counted(suite), system
    )


def _counted(suite: ElementTree.Element) -> tuple[int, list[str], dict[str, int], float]:
    """Return the number passed, the failed tests, the reasons of skips, and the seconds."""
    failed = [
        case.attrib["name"] for case in suite if {"failure", "error"} & {part.tag for part in case}
    ]
    skipped = dict(Counter(part.attrib["message"] for part in suite.iter("skipped")))
    passed = int(suite.attrib["tests"]) - len(failed) - int(suite.attrib["skipped"])
    return passed, failed, skipped, float(suite.attrib["time"])


def make(folder: Path, environments: Iterable[str], index: str = CPU_INDEX) -> list[str]:
    """Make an environment for each pair of a Python and a torch, and return their interpreters.

    What cannot be made is said on stderr and left out: a Python that is not on the path, a torch
    that has no build for it, and each dependency of the tests that cannot be installed there. The
    tests that need one are skipped.

    Args:
        folder: Where the environments are made, each in a folder of its own.
        environments: Pairs such as "3.12:2.13.0".
        index: The package index from which torch is installed.
    """
    made = []
    for pair in environments:
        python, torch = pair.split(":")
        place = folder / f"python{python}-torch{torch}"
        install = [str(place / "bin" / "python"), "-m", "pip", "install", "-q"]
        steps = [
            [f"python{python}", "-m", "venv", str(place)],
            [*install, f"torch=={torch}", "--index-url", index],
            [*install, "-e", str(ROOT)],
        ]
        try:
            for step in track(steps, f"Python {python}, torch {torch}"):
                subprocess.run(step, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"left out: Python {python} with torch {torch}: {error}", file=sys.stderr)
            continue
        _install_tests_needs(install, pair)
        made.append(install[0])
    return made


REQUIREMENTS = """
import importlib.metadata
for line in importlib.metadata.requires("torchdevice-portable"):
    requirement, _, marker = line.partition(";")
    if ("test" in marker or "hf" in marker) and not requirement.startswith("torchdevice"):
        print(requirement.strip())
"""


def _install_tests_needs(install: Sequence[str], pair: str) -> None:
    """Install ``[test]``, or else each of its requirements that can be installed."""
    if subprocess.run([*install, "-e", f"{ROOT}[test]"], check=False).returncode == 0:
        return
    listed = subprocess.run(
        [install[0], "-c", REQUIREMENTS], capture_output=True, text=True, check=True
    ).stdout
    for requirement in track(listed.splitlines(), pair):
        if subprocess.run([*install, requirement], check=False).returncode:
            print(f"left out: {requirement} in {pair}, and the tests that need it", file=sys.stderr)


def table(rows: Iterable[Row]) -> str:
    """Return the rows in Markdown, with the failed tests and the reasons of skips."""
    lines = [
        "| Python | torch | engine | ran | on | passed | failed | left out | seconds | machine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    reasons: dict[str, int] = {}
    for row in rows:
        failed = " ".join([str(len(row.failed)), *(f"`{name}`" for name in row.failed[:5])])
        # In parentheses: Markdown reads [1] [2] as a reference.
        numbers = [reasons.setdefault(reason, len(reasons) + 1) for reason in row.skipped]
        left_out = f"{sum(row.skipped.values())}" + (
            f" ({', '.join(map(str, numbers))})" if numbers else ""
        )
        cells = (*row[:5], row.passed, failed, left_out, f"{row.seconds:.0f}", row.system)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return (
        "\n".join([*lines, *(["", "Why tests were left out:", "", *notes] if notes else [])]) + "\n"
    )


def record(rows: Iterable[Row]) -> list[Row]:
    """Replace recorded runs of the same environments and engines, and return all records.

    An environment in which nothing ran is not recorded.
    """
    known = read(FIGURES) if FIGURES.exists() else []
    latest = {row[:3]: row for row in [*known, *(row for row in rows if row.engine)]}
    kept = [
        latest[key]
        for key in sorted(latest, key=lambda key: [_numbers(key[0]), _numbers(key[1]), key[2]])
    ]
    save(kept, FIGURES)
    return kept


def read(file: Path) -> list[Row]:
    """Return the rows of a file."""
    return [Row(**row) for row in json.loads(file.read_text())]


def save(rows: Iterable[Row], file: Path) -> None:
    """Write rows to a file, one a line."""
    file.write_text("[\n" + ",\n".join(json.dumps(row._asdict()) for row in rows) + "\n]\n")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without a suffix such as "+cpu"."""
    return tuple(int(part) for part in version.partition("+")[0].split("."))


def write(rows: Iterable[Row]) -> None:
    """Record the rows, and write the page of all that are recorded."""
    header = HEADER.format(tests=", ".join(f"`{Path(test).name}`" for test in TESTS))
    recorded = record(rows)
    PAGE.write_text(header + table(recorded) + FOOTER.format(missing=_missing(recorded)))


def _missing(rows: Sequence[Row]) -> str:
    """Return a sentence with supported Pythons and torch releases without a run, if any."""
    pairs = [pair.split(":") for pair in ENVIRONMENTS]
    ran = [(_numbers(row.python), _numbers(row.torch)) for row in rows]
    pythons = [
        f"Python {name}"
        for name, _ in pairs
        if all(found[:2] != _numbers(name) for found, _ in ran)
    ]
    torches = [
        f"torch {name}"
        for _, name in pairs
        if all(found[:2] != _numbers(name)[:2] for _, found in ran)
    ]
    return (
        f"Nothing has run on {' or '.join([*pythons, *torches])} yet." if pythons or torches else ""
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Return 1 if a test failed, or none ran."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.platforms", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "interpreters",
        nargs="*",
        metavar="PYTHON",
        help="interpreters of environments that are there",
    )
    parser.add_argument(
        "--make", type=Path, metavar="FOLDER", help="make environments in a folder first"
    )
    parser.add_argument(
        "--environments",
        nargs="+",
        default=ENVIRONMENTS,
        metavar="PYTHON:TORCH",
        help="what to make",
    )
    parser.add_argument(
        "--index", default=CPU_INDEX, metavar="URL", help="the package index of torch"
    )
    parser.add_argument(
        "--engine", default="mode", choices=["mode", "wrap", "both"], help="on which engine"
    )
    parser.add_argument(
        "--write", action="store_true", help="also record the runs and write docs/platforms.md"
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="also write the runs' rows to a file, for --join"
    )
    parser.add_argument(
        "--join",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="record the rows of files and write the page",
    )
    parser.add_argument(
        "--whole", action="store_true", help="take the default run, which is five minutes each"
    )
    parser.add_argument(
        "--workers", default="auto", metavar="N", help="how many processes take the default run"
    )
    options = parser.parse_args(argv)
    if options.join:
        joined = [row for file in options.join for row in read(file)]
        write(joined)
        print(table(joined))
        return _status(joined)
    tests, ran = (
        (("-n", options.workers), "the default run") if options.whole else (TESTS, "a part")
    )
    engines = ("mode", "wrap") if options.engine == "both" else (options.engine,)
    made = make(options.make, options.environments, options.index) if options.make else []
    runs = [
        (interpreter, engine)
        for interpreter in [*options.interpreters, *made]
        for engine in engines
    ]
    rows = []
    for interpreter, engine in track(runs, "environments"):
        rows.append(run(interpreter, tests, engine, ran))
        if options.write:  # after each run, because an interrupt must not lose an hour's work
            write(rows)
        if options.rows:
            save(rows, options.rows)
    print(table(rows))
    return _status(rows)


def _status(rows: Sequence[Row]) -> int:
    """Return 1 if a test failed, or none ran."""
    return int(not rows or any(row.failed or not row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
