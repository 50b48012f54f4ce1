"""Machine instructions of one call by valgrind's callgrind, which hardly vary between runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks import cases

_COUNTED = (
    "ordinary operator, 4 elements",
    "factory with a device",
    "x.to(device), nothing moves",
    "x.to(device), which copies",
    "torch.device(...)",
)
_CONDITIONS = (cases.BARE, cases.NOTHING, cases.CONTEXT, cases.CPU, cases.WRAPPED)


_CALLS = 200

_mark, _MARK = threading.get_native_id, "PyThread_get_thread_native_id"
"""A Python function, and the C function that it calls. At each call callgrind writes its counts and
resets them.
"""


def calls_to_count(only: str) -> int:
    """Make the marked calls that callgrind counts, in one process. Return the exit status."""
    # Until here valgrind only translated, because it takes a minute to count the import of torch.
    begin = subprocess.Popen(
        ["callgrind_control", "--instr=on", str(os.getpid())], stdout=subprocess.DEVNULL
    )
    while begin.poll() is None:  # valgrind hears the command only while the process runs
        pass
    if begin.returncode:
        return begin.returncode
    for case in _cases_counted(only):
        for condition in _CONDITIONS:
            with cases.CONDITIONS[condition]():
                call = case.prepare(cases.named_device(condition))
                for _ in range(50):
                    call()
                _mark()
                for _ in range(_CALLS):
                    call()
                _mark()
    return 0


def _cases_counted(only: str) -> list[cases.Case]:
    return [case for case in cases.CASES if case.name in _COUNTED and only in case.name]


def count(only: str) -> int:
    """Count and print instructions of cases named with ``only``. Return the exit status."""
    if shutil.which("valgrind") is None:
        print(
            "valgrind is not installed. Install it to count instructions, or measure times.",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        watched = [sys.executable, "-m", "benchmarks", "--counted", only]
        options = [
            "--instr-atstart=no",
            f"--dump-before={_MARK}",
            f"--callgrind-out-file={folder}/out",
        ]
        subprocess.run(
            ["valgrind", "--tool=callgrind", *options, *watched],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        print(
            f"{'instructions of one call':34}"
            + "".join(f"{condition:>20}" for condition in _CONDITIONS)
        )
        counted = _cases_counted(only)
        # Ours are the last; starting threads calls the C function too.
        marks = 2 * len(counted) * len(_CONDITIONS)
        last = len(list(Path(folder).glob("out.*")))
        # The second file of each pair counts the calls.
        numbers = iter(range(last - marks + 2, last + 1, 2))
        for case in counted:
            counts = [_summary(Path(f"{folder}/out.{next(numbers)}")) / _CALLS for _ in _CONDITIONS]
            print(f"{case.name:34}" + "".join(f"{count:20,.0f}" for count in counts))
    return 0


def _summary(part: Path) -> int:
    """Return the number of instructions in an output file of callgrind."""
    found = re.search(r"^(?:summary|totals): (\d+)", part.read_text(), re.MULTILINE)
    assert found, f"{part} has no summary"
    return int(found[1])
