"""On which Pythons and builds of torch the package works: ``python -m benchmarks.platforms PYTHON...``.

Each PYTHON is an interpreter in whose environment torch and the tests' dependencies are installed. ``--make FOLDER``
makes such environments first, one for each pair of ``--python`` and ``--torch``. A small part of the suite runs in
each, against this checkout, or with ``--whole`` all of it, and the table says how it went.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchdevice.cli.progress import track

ROOT = Path(__file__).parent.parent

PAGE = ROOT / "docs" / "platforms.md"

TESTS = ("tests/test_scope.py", "tests/test_torch_cuda.py", "tests/test_amp.py", "tests/test_data.py")
"""The part of the suite: scopes, ``torch.cuda``, mixed precision, loading of files and data."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


HEADER = """# Where it has run

Written by `python -m benchmarks.platforms --write PYTHON...`, which runs a part of the suite with each interpreter, or
with `--whole` all of it: here {tests}. To make the environments first, for every Python on the path and every torch:

```sh
python -m benchmarks.platforms --make build/platforms --python 3.10 3.11 3.12 3.13 3.14 --torch 2.10.0 2.13.0
```

On {date}, on {machine}:

"""

FOOTER = """
`.ci/run` runs the whole suite, on both engines, with torch 2.13.0+cpu. Nothing has run on Apple MPS, on Intel XPU, on a
real CUDA device, on macOS or on Windows. The runtimes for such devices are tested against torch's signatures, with
recorded calls.
"""


class Row(NamedTuple):
    """How the tests went in one environment."""

    python: str
    torch: str
    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: float


def run(interpreter: str, tests: Sequence[str] = TESTS) -> Row:
    """Run tests with an interpreter; their files and flags of pytest."""
    versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
    try:
        found = subprocess.run([interpreter, "-c", versions], capture_output=True, text=True, check=True)
    except OSError as error:
        return Row(interpreter, f"cannot be started: {error.strerror}", 0, (), 0, 0.0)
    except subprocess.CalledProcessError as error:
        return Row(interpreter, f"cannot be imported: {error.stderr.splitlines()[-1]}", 0, (), 0, 0.0)
    python, torch = found.stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", *tests]
        subprocess.run(
            [interpreter, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if not results.exists():
            return Row(python, f"{torch}: pytest did not run", 0, (), 0, 0.0)
        (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
    failed = tuple(case.attrib["name"] for case in suite if {"failure", "error"} & {part.tag for part in case})
    ran, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    return Row(python, torch, ran - len(failed) - skipped, failed, skipped, float(suite.attrib["time"]))


def make(folder: Path, pythons: Iterable[str], torches: Iterable[str]) -> list[str]:
    """Make an environment for each pair of a Python and a torch, and return their interpreters.

    A Python that is not on the path, and a pair for which torch has no build, are said on stderr and left out.
    """
    made = []
    for python, torch in itertools.product(pythons, torches):
        place = folder / f"python{python}-torch{torch}"
        interpreter = place / "bin" / "python"
        steps = [
            [f"python{python}", "-m", "venv", str(place)],
            [str(interpreter), "-m", "pip", "install", "-q", f"torch=={torch}", "--index-url", CPU_INDEX],
            [str(interpreter), "-m", "pip", "install", "-q", f"{ROOT}[test]"],
        ]
        try:
            for step in track(steps, f"Python {python}, torch {torch}"):
                subprocess.run(step, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"left out: Python {python} with torch {torch}: {error}", file=sys.stderr)
        else:
            made.append(str(interpreter))
    return made


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table, with the names of the tests that failed."""
    lines = ["| Python | torch | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        failed = " ".join([str(len(row.failed)), *(f"`{name}`" for name in row.failed[:5])])
        lines.append(f"| {row.python} | {row.torch} | {row.passed} | {failed} | {row.skipped} | {row.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table. Return 1 if a test failed, or none ran."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.platforms", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("interpreters", nargs="*", metavar="PYTHON", help="interpreters of environments that are there")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make environments in a folder first")
    parser.add_argument("--python", nargs="+", default=["3.10", "3.11", "3.12", "3.13", "3.14"], metavar="X.Y")
    parser.add_argument("--torch", nargs="+", default=["2.10.0", "2.13.0"], metavar="X.Y.Z")
    parser.add_argument("--write", action="store_true", help="also write docs/platforms.md")
    parser.add_argument("--whole", action="store_true", help="run the whole suite, which takes ten minutes each")
    options = parser.parse_args(argv)
    tests = ("-n", "auto") if options.whole else TESTS
    made = make(options.make, options.python, options.torch) if options.make else []
    rows = [run(interpreter, tests) for interpreter in track([*options.interpreters, *made], "environments")]
    print(table(rows))
    if options.write:
        names = "all of it" if options.whole else ", ".join(f"`{Path(test).name}`" for test in TESTS)
        machine = f"{platform.system()} {platform.machine()}, with {os.cpu_count()} processors and no accelerator"
        header = HEADER.format(tests=names, date=datetime.date.today().isoformat(), machine=machine)
        PAGE.write_text(header + table(rows) + FOOTER)
    return int(not rows or any(row.failed or not row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
