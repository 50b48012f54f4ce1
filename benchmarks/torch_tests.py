"""PyTorch's own CUDA tests on two simulated GPUs: ``python -m benchmarks.torch_tests [CHECKOUT] [--write]``.

CHECKOUT is a folder with PyTorch's sources, of the installed release where it can be had: ``test/test_cuda.py`` and so
on are run from there. Without it only those tests are run that torch's wheel has. Each file runs in a process of its
own. A test that ends its process, or that takes longer than ``--limit``, is noted, and the file goes on after it in a
new process. ``--write`` writes the results, grouped by cause, to docs/torch-tests.md. Causes are found by
:data:`RULES`, in the texts of the errors and the names of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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

WHOLE = ("test_cuda.py", "test_cuda_multigpu.py", "test_cuda_sanitizer.py", "test_cuda_trace.py")
"""Files whose tests are all run."""

SAMPLED = ("test_torch.py", "test_nn.py", "test_ops.py")
"""Files with tests that torch makes for each type of device. A sample of those for CUDA is run."""

OF_THE_WHEEL = ("test_distributed_nccl.py",)
"""Files beside this one, whose tests the wheel of torch has. A sample is run, also without a checkout."""

RULES: dict[str, str] = {
    "crash: the test ended its process": r"^outcome: crashed",
    "time: the test took longer than the limit, most of these compute for long or compile C++": r"^outcome: timed out",
    "network: the test loads something": r"URLError|ConnectionError",
    "other release: a setting has another default or another type in the installed torch": (
        r"fp32 precision flag leak|Object comparison failed: \((True|False), (True|False)\) != (True|False)"
    ),
    "other release: the test needs a name that the installed torch lacks": (
        r"AttributeError: (module 'torch|type object 'torch)|ImportError|No module named"
    ),
    "other release: the installed torch raises an error of another type, sets no variable or names a function anew": (
        r"Unrecognized key 'foo'|::.*(cuda_module_loading_env|allocate_in_thread_to_pool|mempool_multithread)"
    ),
    "other release: what a generator allocates for a capture": r"::.*(graph_memory_stats|stats_of_multiple_generators)",
    "compiles C++ for CUDA": r"ExtensionRefusedError|cpp_memory_snapshot",
    "allocator: checkpoints of its state": r"getCheckpointState|checkPoolLiveAllocations",
    "allocator: memory pools": (
        r"(?i)MemPool|cudagraph_segments|_(begin|end)Allocate|::.*(graph.*(memory|successive|propagates)|_and_graphs)"
    ),
    "allocator: raw memory": r"raw_alloc|caching_allocator_alloc",
    "allocator: when freed memory is used again": r"allocation (not|re-used|not re-used)",
    "allocator: its settings, limits and errors": (
        r"::.*(allocator_settings|out_of_memory|memory_fraction|fuzz|workspace|memory_stats|oom)"
    ),
    "snapshots: a block's address is not that of its values": r"::.*test_memory_snapshot$",
    "snapshots: other causes": r"::.*memory_(plots|snapshot|profiler)",
    "asynchrony: the test expects that a race has an effect": r"::.*concurrent_replay",
    "not supported: a pointer, a handle or a driver function": r"NotSupportedError",
}
"""Causes of failures: a regular expression that is searched in the outcome, the test's name and the error's text. The
first that is found counts."""

REASONS: dict[str, str] = {
    "another platform": r"(?i)rocm|hip|windows|jetson|arm|xpu|mps|s390|mac",
    "other hardware or driver": (
        r"(?i)sm ?\d\d|cudnn|capab|nvml|green|gpu|multi|driver|device|cuda-?python|nccl|P2P|fabric"
    ),
    "more memory": r"(?i)memory|insufficient|large",
    "a package that is not there": (
        r"(?i)not installed|no module|torchvision|triton|magma|scipy|numba|pynvml|package|lapack"
    ),
    "slow tests": r"(?i)slow",
}
"""Why tests were skipped, in the same way, searched in the reason."""

OTHER = "other"


class Result(NamedTuple):
    """What became of one test.

    Attributes:
        file: The name of its file.
        test: ``Class.method``.
        outcome: ``"passed"``, ``"failed"``, ``"skipped"``, ``"crashed"`` or ``"timed out"``.
        text: The error's text, the reason of a skip, or the end of what the process wrote.
    """

    file: str
    test: str
    outcome: str
    text: str

    @property
    def cause(self) -> str:
        """The first rule that applies."""
        if self.outcome == "skipped":
            return _first(REASONS, self.text)
        return _first(RULES, f"outcome: {self.outcome}\n{self.file}::{self.test}\n{self.text}")


def _first(rules: dict[str, str], text: str) -> str:
    return next((name for name, pattern in rules.items() if re.search(pattern, text, re.MULTILINE)), OTHER)


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


def run_file(path: Path, options: Options, drawn: Sequence[str] = ()) -> list[Result]:
    """Run the tests of a file, in as many processes as it takes.

    Args:
        path: The file.
        options: How.
        drawn: Size and seed of the sample, as text; empty for all tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        notes, log = Path(folder, "notes"), Path(folder, "log")
        while True:
            ended = _run_once(path, notes, log, options, drawn)
            planned, done, began = _read(notes)
            if ended == "" or began is None:
                break
            tail = log.read_text(errors="replace")[-4000:]
            _append(notes, ended=began, outcome=ended, text=tail)
        if not planned:
            return [Result(path.name, "the file", ended or "failed", log.read_text(errors="replace")[-4000:])]
        return [_result(path.name, test, done) for test in planned]


def _result(file: str, test: str, done: dict[str, tuple[str, str]]) -> Result:
    lost = ("failed", "the process ended without a result")
    outcome, text = done.get(test) or done.get(test.partition(".")[0]) or lost
    return Result(file, test, outcome, text)


def _run_once(path: Path, notes: Path, log: Path, options: Options, drawn: Sequence[str]) -> str:
    """Return how a process ended that runs the tests without a result: ``""``, ``"crashed"`` or ``"timed out"``."""
    command = [sys.executable, "-m", "torchdevice", "run", "--quiet", "--target", options.target]
    command += ["--memory", options.memory, "--engine", options.engine]
    paths = os.pathsep.join(filter(None, [str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH")]))
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(PROGRAM), str(path), str(notes), *drawn],
            cwd=path.parent,
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
    """Return the planned tests, the outcomes with their texts, and the test that began and did not end."""
    lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    planned = next((line["planned"] for line in lines if "planned" in line), [])
    done = {line["ended"]: (line["outcome"], line["text"]) for line in lines if "ended" in line}
    began = [line["began"] for line in lines if "began" in line]
    return planned, done, began[-1] if began and began[-1] not in done else None


def _append(notes: Path, **what: str) -> None:
    with notes.open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def table(results: Iterable[Result]) -> str:
    """Return the numbers of each file as a table."""
    rows = ["| file | tests | skipped | run | passed | |", "|---|---|---|---|---|---|"]
    outcomes: dict[str, Counter[str]] = {}
    for each in results:
        outcomes.setdefault(each.file, Counter())[each.outcome] += 1
    for file, counts in outcomes.items():
        ran = counts.total() - counts["skipped"]
        share = f"{counts['passed'] / ran:.1%}" if ran else ""
        rows.append(f"| `{file}` | {counts.total()} | {counts['skipped']} | {ran} | {counts['passed']} | {share} |")
    return "\n".join(rows)


def causes(results: Iterable[Result]) -> str:
    """Return the tests by cause as a table, the most frequent cause first."""
    groups: dict[str, list[Result]] = {}
    for each in results:
        groups.setdefault(each.cause, []).append(each)
    rows = ["| cause | tests | which |", "|---|---|---|"]
    for cause, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        names = ", ".join(dict.fromkeys(f"`{each.test.partition('.')[2] or each.test}`" for each in found))
        rows.append(f"| {cause} | {len(found)} | {names} |")
    return "\n".join(rows)


def reasons(results: Iterable[Result]) -> str:
    """Return the numbers of skipped tests by reason as a table."""
    counts = Counter(each.cause for each in results)
    return "\n".join(["| needs | tests |", "|---|---|", *(f"| {name} | {n} |" for name, n in counts.most_common())])


def page(results: Sequence[Result], release: str, sample: Sequence[str]) -> str:
    """Return the page.

    Args:
        results: Of all files.
        release: Of the checkout.
        sample: Size and seed of the samples.
    """
    failed = [each for each in results if each.outcome not in ("passed", "skipped")]
    return _PAGE.format(
        torch=torch.__version__,
        release=release,
        files=table(results),
        causes=causes(failed),
        reasons=reasons(each for each in results if each.outcome == "skipped"),
        sampled=_said_of_samples(results, *sample),
    )


def _said_of_samples(results: Sequence[Result], size: str, seed: str) -> str:
    files = [f"`{name}`" for name in SAMPLED if any(each.file == name for each in results)]
    if not files:
        return ""
    made = f"Of the tests that torch makes for each type of device ({', '.join(files)}),"
    return f"{made} {size} of each file were drawn with seed {seed}.\n"


_PAGE = """# PyTorch's own CUDA tests

<!-- Made by python -m benchmarks.torch_tests CHECKOUT --write; do not edit. -->

PyTorch's tests of `torch.cuda` run here as they are, on two simulated GPUs of 5 GB, with the installed torch {torch}
and the tests of PyTorch {release}. Where these are two releases, some tests expect what torch no longer does.

`python -m benchmarks.torch_tests CHECKOUT` starts a process for each file, and another one after a test that ends its
process or takes too long. `--files` and `--sample` choose what runs, `--json FILE` keeps the results, `--results
FILE` makes the page of them again.
{sampled}
{files}

## Failures by cause

{causes}

## Skipped tests by reason

The tests skip themselves, for reasons they name.

{reasons}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    results = _known(options.results) if options.results else _run(options)
    print(table(results))
    print(causes(each for each in results if each.outcome not in ("passed", "skipped")))
    if options.json:
        options.json.write_text(json.dumps([{**each._asdict(), "cause": each.cause} for each in results], indent=1))
    if options.write:
        PAGE.write_text(page(results, _release(options.checkout), _drawn(options)))
    return 0


def _known(files: Sequence[Path]) -> list[Result]:
    """Return the results of earlier runs. Causes are found again."""
    return [Result(*(each[name] for name in Result._fields)) for file in files for each in json.loads(file.read_text())]


def _drawn(options: argparse.Namespace) -> list[str]:
    return [str(options.sample), str(options.seed)]


def _run(options: argparse.Namespace) -> list[Result]:
    wanted: list[tuple[Path, list[str]]] = []
    if options.checkout:
        tests = (options.checkout / "test").resolve()
        wanted = [(tests / name, []) for name in WHOLE]
        wanted += [(tests / name, _drawn(options)) for name in SAMPLED if options.sample]
    wanted += [(PROGRAM.with_name(name), _drawn(options)) for name in OF_THE_WHEEL if options.sample]
    if options.files:
        wanted = [each for each in wanted if each[0].name in options.files]
    how = Options(options.limit, options.target, options.memory, options.engine)
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = list(pool.map(lambda each: run_file(each[0], how, each[1]), wanted))
    return [result for part in parts for result in part]


def _release(checkout: Path | None) -> str:
    version = checkout / "version.txt" if checkout else None
    return version.read_text().strip() if version and version.exists() else "of an unknown release"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torch_tests", description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="a folder with PyTorch's sources")
    parser.add_argument("--write", action="store_true", help="write docs/torch-tests.md")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--results", nargs="+", type=Path, metavar="FILE", help="take results of --json; run nothing")
    parser.add_argument("--files", nargs="+", metavar="NAME", help="run only these files, such as test_cuda.py")
    parser.add_argument("--sample", type=int, default=200, help="device-generic tests of each file (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="files that run at the same time (default: 1)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a test (default: 120)")
    parser.add_argument("--target", default=Options().target, help="the devices (default: %(default)s)")
    parser.add_argument("--memory", default=Options().memory, help="of each device (default: %(default)s)")
    parser.add_argument("--engine", default="auto", help="of the scope (default: auto)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
