"""PyTorch's CUDA tests on simulated GPUs: ``benchmarks.torch_tests [CHECKOUT] [--write]``.

CHECKOUT is a folder with PyTorch's sources, of the installed release where it can be had: the files
and folders of
:data:`SUITES` are run from its ``test``. Without it only those tests are run that torch's wheel
has. Each file runs in a process of its own. A test that ends its process, or that takes longer than
``--limit``, is noted, and the file goes on after it in a new process. ``--write`` writes the
results, grouped by cause, to docs/torch-tests.md. Causes, and whose each is, stand in
torch_tests.json; they are found in the texts of the errors and the names of the tests. ``--against
FILE`` reports what changed since an earlier run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

PROGRAM = Path(__file__).with_name("one_test_file.py")

PAGE = Path(__file__).parents[1] / "docs" / "torch-tests.md"

DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
"""``causes`` of failures, whose each is, and ``skips``, the reasons of tests that skip themselves.
Each is found by a regular expression, and the first that is found counts.
"""


class Suite(NamedTuple):
    """Tests that have a row of their own in the results.

    Attributes:
        name: A file, or a folder whose files all belong to the suite: of a checkout's ``test``, or
            beside this one.
        drawn: Which tests a sample is drawn from: all tests (``"any"``), or those that torch makes
            for each type of device, for CUDA (``"cuda"``). Without a text all tests are run.
        devices: How many GPUs are simulated.
        in_wheel: Whether torch's wheel has the tests, so that no checkout is needed.
    """

    name: str
    drawn: str = "cuda"
    devices: int = 2
    in_wheel: bool = False


SUITES = (
    Suite("test_cuda.py", ""),
    Suite("test_cuda_multigpu.py", ""),
    Suite("test_cuda_sanitizer.py", ""),
    Suite("test_cuda_trace.py", ""),
    *(
        Suite(f"test_{name}.py")
        for name in ("torch", "nn", "ops", "autograd", "foreach", "modules", "optim")
    ),
    Suite("test_transformers.py"),
    Suite("test_inductor_cuda.py", "any"),
    Suite("distributed/test_c10d_nccl.py", "", 4),
    *(
        Suite(f"distributed/{name}", "any", 4)
        for name in (
            "test_c10d_functional_native.py",
            "test_dynamo_distributed.py",
            "_tensor",
            "tensor",
            "_composable",
            "fsdp",
            "checkpoint",
        )
    ),
    # By the installed torch one rank for each device, and these tests have two stages.
    Suite("distributed/pipelining", "any"),
    Suite("test_distributed_nccl.py", "any", in_wheel=True),
)

FROM_EACH_FILE = 4
"""The least number of tests that are drawn from a file of a folder. A small sample leaves files
out.
"""

OTHER = "other"


class Result(NamedTuple):
    """What became of one test.

    Attributes:
        file: The path of its file in ``test``.
        test: ``Class.method``.
        outcome: ``"passed"``, ``"failed"``, ``"skipped"``, ``"crashed"``, ``"timed out"``, ``"not
            imported"`` (a file).
        text: The error's text, the reason of a skip, or the end of what the process wrote.
    """

    file: str
    test: str
    outcome: str
    text: str

    @property
    def failed(self) -> bool:
        """Whether the test, or the import of its file, had another end than a test should have."""
        return self.outcome not in ("passed", "skipped")

    @property
    def suite(self) -> str:
        """The name of its suite, or else of its file."""
        return next(
            (each.name for each in SUITES if f"{self.file}/".startswith(f"{each.name}/")), self.file
        )

    @property
    def cause(self) -> tuple[str, str]:
        """Whose the failure or the skip is, and the cause."""
        rules = DATA["skips" if self.outcome == "skipped" else "causes"]
        text = f"outcome: {self.outcome}\n{self.file}::{self.test}\n{self.text}"
        if self.outcome == "skipped":
            text = self.text
        found = (each for each in rules if re.search(each["found by"], text, re.MULTILINE))
        return next(((each["whose"], each["cause"]) for each in found), ("not known", OTHER))


class Options(NamedTuple):
    """How tests are run.

    Attributes:
        limit: Seconds that one test may take, or the import of its file.
        target: The target, with the number of devices.
        memory: Of each device; tests that need more are skipped.
        engine: The engine of the scope.
    """

    limit: float = 120
    target: str = "simulated:cuda:2"
    memory: str = "5000000000"
    engine: str = "auto"


class Work(NamedTuple):
    """A file whose tests are to be run.

    Attributes:
        path: The file.
        name: How the results name it.
        sample: Size and seed of the sample, and what it is drawn from, as texts; empty for all
            tests.
        tests: The ``test`` of the checkout, which tests import each other from.
    """

    path: Path
    name: str
    sample: tuple[str, ...] = ()
    tests: Path | None = None


def run_file(work: Work, options: Options) -> list[Result]:
    """Run the tests of a file, in as many processes as it takes."""
    with tempfile.TemporaryDirectory() as folder:
        notes, log = Path(folder, "notes"), Path(folder, "log")
        known, ended = -1, ""
        while True:
            ended = _run_once(work, notes, log, options)
            planned, done, began = _read(notes)
            if began is not None and ended:
                _append(
                    notes, ended=began, outcome=ended, text=log.read_text(errors="replace")[-4000:]
                )
            elif ended == "" or len(done) == known:
                # A process that ended between two tests is followed by another.
                break
            known = len(done)
        if notes.exists() and not planned and not ended:  # a file whose tests are all left out
            return []
        if not planned:
            return [
                Result(
                    work.name,
                    "the file",
                    ended or "failed",
                    log.read_text(errors="replace")[-4000:],
                )
            ]
        return [_result(work.name, test, done) for test in planned]


def _result(file: str, test: str, done: dict[str, tuple[str, str]]) -> Result:
    lost = ("failed", "the process ended without a result")
    outcome, text = done.get(test) or done.get(test.partition(".")[0]) or lost
    return Result(file, test, outcome, text)


def _run_once(work: Work, notes: Path, log: Path, options: Options) -> str:
    """Return how a test process ended without a result: ``""``, ``"crashed"``, ``"timed out"``."""
    command = [sys.executable, "-m", "torchdevice", "run", "--quiet", "--target", options.target]
    command += ["--memory", options.memory, "--engine", options.engine]
    folders = (PROGRAM.parents[1], work.tests, os.environ.get("PYTHONPATH"))
    paths = os.pathsep.join(str(each) for each in folders if each)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(PROGRAM), str(work.path), str(notes), *work.sample],
            cwd=work.path.parent,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return _watch(process, notes, options.limit)
        finally:
            # A test may have left processes of its own behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _watch(process: subprocess.Popen[bytes], notes: Path, limit: float) -> str:
    size, since = -1, time.monotonic()
    while process.poll() is None:
        now = notes.stat().st_size if notes.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > limit:
            return "timed out"
        time.sleep(0.05)
    return "" if process.returncode == 0 else "crashed"


def _read(notes: Path) -> tuple[list[str], dict[str, tuple[str, str]], str | None]:
    """Return the planned tests, the outcomes with texts, and the test that did not end."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    planned = next((line["planned"] for line in lines if "planned" in line), [])
    done = {line["ended"]: (line["outcome"], line["text"]) for line in lines if "ended" in line}
    began = [line["began"] for line in lines if "began" in line]
    return planned, done, began[-1] if began and began[-1] not in done else None


def _append(notes: Path, **what: str) -> None:
    with notes.open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def table(results: Iterable[Result]) -> str:
    """Return the numbers of each suite as a table."""
    titles = (
        "suite",
        "files",
        "not imported",
        "tests",
        "skipped",
        "run",
        "passed",
        "of those run",
        "of what could",
    )
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    suites: dict[str, list[Result]] = {}
    for each in results:
        suites.setdefault(each.suite, []).append(each)
    for suite, found in suites.items():
        files = len({each.file for each in found})
        counts = Counter(each.outcome for each in found)
        absent = counts.pop("not imported", 0)
        ran = counts.total() - counts["skipped"]
        others = (
            each for each in found if each.failed and each.cause[0] not in ("ours", "not known")
        )
        could = ran - sum(each.outcome != "not imported" for each in others)
        shares = [f"{counts['passed'] / number:.1%}" if number else "" for number in (ran, could)]
        figures = (files, absent, counts.total(), counts["skipped"], ran, counts["passed"], *shares)
        rows.append(f"| `{suite}` | {' | '.join(map(str, figures))} |")
    return "\n".join(rows)


def causes(results: Iterable[Result]) -> str:
    """Return the tests by cause as a table, the most frequent cause first."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for each in results:
        groups.setdefault(each.cause, []).append(each)
    rows = ["| whose | cause | tests | which |", "|---|---|---|---|"]
    for (whose, cause), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        names = ", ".join(dict.fromkeys(f"`{_short(each)}`" for each in found))
        rows.append(f"| {whose} | {cause} | {len(found)} | {names} |")
    return "\n".join(rows)


def _short(result: Result) -> str:
    return result.test.partition(".")[2] or (
        result.file if result.outcome == "not imported" else result.test
    )


def owners(results: Iterable[Result]) -> str:
    """Return the numbers of failures by whose they are, for each suite, as a table."""
    counts: dict[str, Counter[str]] = {}
    for each in results:
        counts.setdefault(each.suite, Counter())[each.cause[0]] += 1
    columns = list(DATA["owners"])
    rows = [f"| suite | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    rows += [
        f"| `{suite}` | {' | '.join(str(of[each]) for each in columns)} |"
        for suite, of in counts.items()
    ]
    return "\n".join(rows)


def reasons(results: Iterable[Result]) -> str:
    """Return the numbers of skipped tests by reason as a table."""
    counts = Counter(each.cause[1] for each in results)
    return "\n".join(
        [
            "| needs | tests |",
            "|---|---|",
            *(f"| {name} | {n} |" for name, n in counts.most_common()),
        ]
    )


def changes(before: Iterable[Result], now: Iterable[Result]) -> tuple[str, bool]:
    """Return tests whose outcome changed since an earlier run, and whether one had passed.

    Only tests of both runs are compared, since a test that was added has no outcome to change.
    """
    known = {(each.file, each.test): each.outcome for each in before}
    rows, worse = ["| test | before | now |", "|---|---|---|"], False
    for each in now:
        was = known.get((each.file, each.test), each.outcome)
        if was != each.outcome:
            rows.append(f"| `{each.file}::{each.test}` | {was} | {each.outcome} |")
            worse = worse or (was == "passed" and each.failed)
    return "\n".join(rows), worse


def page(results: Sequence[Result], release: str, sample: Sequence[str]) -> str:
    """Return the page.

    Args:
        results: Of all files.
        release: Of the checkout.
        sample: Size and seed of the samples.
    """
    failed = [each for each in results if each.failed]
    return _PAGE.format(
        torch=torch.__version__,
        release=release,
        files=table(results),
        owners=owners(failed),
        meanings="\n".join(f"- {whose}: {meaning}." for whose, meaning in DATA["owners"].items()),
        causes=causes(failed),
        reasons=reasons(each for each in results if each.outcome == "skipped"),
        sampled=_said_of_samples(results, *sample),
    )


def _said_of_samples(results: Sequence[Result], size: str, seed: str) -> str:
    names = {each.suite for each in results}
    suites = [f"`{each.name}`" for each in SUITES if each.drawn and each.name in names]
    if not suites:
        return ""
    return (
        f"Of each of the suites {', '.join(suites)} up to {size} tests were drawn with seed "
        f"{seed}.\n"
    )


_PAGE = """# PyTorch's own CUDA tests

<!-- Made by python -m benchmarks.torch_tests CHECKOUT --write; do not edit. -->

PyTorch's tests for CUDA run here as they are, on two or four simulated GPUs of 5 GB. **The installed torch is {torch};
the tests are those of PyTorch {release}.** Where these are two releases, some tests expect what torch no longer does,
and some files cannot be imported. `test_distributed_nccl.py` is in torch's wheel, and so of the installed release.

`python -m benchmarks.torch_tests CHECKOUT` starts a process for each file, and another one after a test that ends its
process or takes too long. The ranks of a distributed test are forked. `--files` and `--sample` choose what runs,
`--json FILE` keeps the results, `--results FILE` makes the page of them again, `--against FILE` says what changed.
{sampled}
{files}

The last share leaves out the failures that are another's.

## Whose the failures are

{owners}

{meanings}

Whose a failure is was found by reading it, once for each cause, and is kept in `benchmarks/torch_tests.json`.

## Failures by cause

{causes}

## Skipped tests by reason

The tests skip themselves, for reasons they name.

{reasons}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a test failed that had passed in the run of ``--against``."""
    options = _parser().parse_args(arguments)
    results = _known(options.results) if options.results else _run(options)
    print(table(results))
    print(causes(each for each in results if each.failed))
    if options.json:
        kept = [
            {**each._asdict(), **dict(zip(("whose", "cause"), each.cause, strict=True))}
            for each in results
        ]
        options.json.write_text(json.dumps(kept, indent=1))
    if options.write:
        PAGE.write_text(
            page(results, _release(options.checkout), (str(options.sample), str(options.seed)))
        )
    if not options.against:
        return 0
    report, worse = changes(_known([options.against]), results)
    print(report)
    return int(worse)


def _known(files: Sequence[Path]) -> list[Result]:
    """Return the results of earlier runs. Causes are found again."""
    return [
        Result(*(each[name] for name in Result._fields))
        for file in files
        for each in json.loads(file.read_text())
    ]


def work_of(suite: Suite, tests: Path | None, size: int, seed: int) -> list[Work]:
    """Return the files of a suite that are run.

    Args:
        suite: The suite.
        tests: The ``test`` of a checkout.
        size: About how many tests are drawn, over all files.
        seed: By which files and tests are drawn.
    """
    beside = PROGRAM.parent / suite.name
    if beside.exists():
        return (
            [Work(beside, suite.name, (str(size), str(seed), suite.drawn), tests)]
            if tests or suite.in_wheel
            else []
        )
    if tests is None:
        return []
    files = (
        [tests / suite.name]
        if suite.name.endswith(".py")
        else sorted((tests / suite.name).rglob("test_*.py"))
    )
    each = max(FROM_EACH_FILE, size // max(1, len(files))) if len(files) > 1 else size
    if suite.drawn:
        files = sorted(random.Random(seed).sample(files, min(len(files), -(-size // each))))
    sample = (str(each), str(seed), suite.drawn) if suite.drawn else ()
    return [Work(file, file.relative_to(tests).as_posix(), sample, tests) for file in files]


def _run(options: argparse.Namespace) -> list[Result]:
    tests = (options.checkout / "test").resolve() if options.checkout else None
    wanted = []
    for suite in SUITES:
        if suite.name in (options.files or [suite.name]) and (options.sample or not suite.drawn):
            target = options.target or f"simulated:cuda:{suite.devices}"
            how = Options(options.limit, target, options.memory, options.engine)
            wanted += [(work, how) for work in work_of(suite, tests, options.sample, options.seed)]
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = list(pool.map(lambda each: run_file(*each), wanted))
    return [result for part in parts for result in part]


def _release(checkout: Path | None) -> str:
    version = checkout / "version.txt" if checkout else None
    return version.read_text().strip() if version and version.exists() else "of an unknown release"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torch_tests", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("checkout", type=Path, nargs="?", help="a folder with PyTorch's sources")
    parser.add_argument("--write", action="store_true", help="write docs/torch-tests.md")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument(
        "--results",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="take results of --json; run nothing",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="say what changed since these results of --json",
    )
    parser.add_argument(
        "--files", nargs="+", metavar="NAME", help="run only these suites, such as test_cuda.py"
    )
    parser.add_argument(
        "--sample", type=int, default=200, help="about how many tests of a suite (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn (default: 0)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="files that run at the same time (default: 1)"
    )
    parser.add_argument(
        "--limit", type=float, default=120, help="seconds for a test (default: 120)"
    )
    parser.add_argument("--target", help="the devices (default: two or four simulated GPUs)")
    parser.add_argument(
        "--memory", default=Options().memory, help="of each device (default: %(default)s)"
    )
    parser.add_argument("--engine", default="auto", help="of the scope (default: auto)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
