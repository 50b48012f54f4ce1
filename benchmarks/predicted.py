"""Predictions of ``check`` for public programs, and the truth: ``benchmarks.predicted CLONES``.

CLONES is a folder with a clone of each repository of ``predicted.txt``, as ``owner+name``. Each
program is taken from the commit in the list, checked, and run on a simulated Mac for at most
``--seconds`` of processor time. ``--write`` keeps the figures in ``predicted.json``, of which
``docs/make_check.py`` makes a table.

A finding counts if its line ran and a report can show it. It was right if something of its kind
happened at the line: a device that means another one for *handled*; an error, or what changes
numbers, for *approximate* and *change*. What happened counts as predicted under the same rule. An
error that ended the program counts if it is about the device: the package's own, one of an import
in the table of packages, or one whose text speaks of devices; not the errors of a program that puts
nothing on a device, because its tensors are on two devices when all new ones are made on one.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.against_report import Event, covers, events_of, predicts
from benchmarks.progress import track
from torchdevice import errors
from torchdevice.check import Finding, Target, Verdict, check_file
from torchdevice.check.environment_rules import PACKAGES
from torchdevice.kernel.journal.callers import PROGRAM, kind_of_file
from torchdevice.report import Report

HERE = Path(__file__).parent

PROGRAMS = HERE / "predicted.txt"

FIGURES = HERE / "predicted.json"

DRIVER = HERE / "lines_that_ran.py"

TARGET = "simulated:mps"


class Program(NamedTuple):
    """A line of the list.

    Attributes:
        repository: ``owner/name`` on GitHub.
        commit: The commit.
        path: The program's file. A ``+`` before it makes all tensors on the device that the program
            puts nowhere.
        arguments: Its arguments.
        held_out: Whether the program was looked at only after the rules were written.
    """

    repository: str
    commit: str
    path: str
    arguments: list[str]
    held_out: bool


def programs() -> list[Program]:
    """Return the list."""
    parts = PROGRAMS.read_text().split(_HELD_OUT)
    found = []
    for held_out, part in enumerate(parts):
        lines = (shlex.split(line, comments=True) for line in part.splitlines())
        found += [Program(*words[:3], words[3:], bool(held_out)) for words in lines if words]
    return found


_HELD_OUT = "# held out:"


def measure(program: Program, clones: Path, seconds: int, kept: Path) -> dict[str, Any]:
    """Return the figures of one program.

    Args:
        program: The program.
        clones: The folder with the clones.
        seconds: How much processor time it may use.
        kept: The folder for its sources and for what was noted. What was noted already is taken
            from there.
    """
    folder = str(kept / "source")
    if not (kept / "noted.json").exists():
        _extract(program, clones, Path(folder))
        _run(program, kept, seconds)
    noted, report = json.loads((kept / "noted.json").read_text()), kept / "report.json"
    said = Report.from_dict(json.loads(report.read_text())) if report.exists() else None
    by_default = program.path.startswith("+")
    events, ended = _events(said, noted, folder, by_default)
    ran = {os.path.realpath(file): set(lines) for file, lines in noted["ran"].items()}
    findings = [each for file in sorted(ran) for each in check_file(file, Target.named(TARGET))]
    counted = [each for each in findings if _counts(each, ran, by_default)]
    # One event of a kind at a line stands for all: they are predicted together or not.
    once = {(event.file, event.line, event.degraded): event for event in events}
    happened = [event for event in once.values() if event.degraded or not by_default]
    figures: Counter[str] = Counter()
    wrong, missed = [], []
    for finding in counted:
        right = any(predicts(finding, event) for event in events)
        figures[f"{_kind(finding.verdict)} {'right' if right else 'wrong'}"] += 1
        wrong += (
            []
            if right
            else [f"{os.path.relpath(finding.path, folder)}:{finding.line} {finding.rule}"]
        )
    for event in happened:
        known = any(covers(finding, event) for finding in findings)
        figures[
            f"{'degraded' if event.degraded else 'handled'} {'predicted' if known else 'missed'}"
        ] += 1
        missed += (
            []
            if known
            else [f"{os.path.relpath(event.file, folder)}:{event.line} {event.said[:80]}"]
        )
    return {
        **program._asdict(),
        "ended": ended,
        "figures": dict(figures),
        "wrong": wrong,
        "missed": missed,
    }


def _slug(program: Program) -> str:
    return re.sub(r"\W+", "-", " ".join([program.repository, program.path, *program.arguments]))


def _extract(program: Program, clones: Path, folder: Path) -> None:
    clone = clones / program.repository.replace("/", "+")
    git = next(each for each in (clone / "repo", clone) if each.exists())
    names = _git(git, "ls-tree", "-r", "--name-only", "-z", program.commit).decode().split("\0")
    wanted = [name for name in names if name.endswith(_WANTED)]
    asked = "".join(f"{program.commit}:{name}\n" for name in wanted).encode()
    there = _git(git, "cat-file", "--batch-check", given=asked).decode().splitlines()
    wanted = [
        name for name, said in zip(wanted, there, strict=True) if not said.endswith(" missing")
    ]
    with tarfile.open(
        fileobj=io.BytesIO(_git(git, "archive", program.commit, "--", *wanted))
    ) as files:
        files.extractall(folder, filter="data")


_WANTED = (".py", ".txt", ".csv", ".json", ".yaml", ".gz")
"""What programs read. Clones may lack large files."""


def _git(clone: Path, *words: str, given: bytes | None = None) -> bytes:
    return subprocess.run(
        ["git", "-C", str(clone), *words], input=given, capture_output=True, check=True
    ).stdout


def _run(program: Program, kept: Path, seconds: int) -> None:
    """Run a program, and keep its report and which of its lines ran."""
    path = kept / "source" / program.path.removeprefix("+")
    shown = f"{'+' * program.path.startswith('+')}{path}"
    command = [sys.executable, "-m", "torchdevice", "run", "--quiet", "--target", TARGET]
    command += [
        f"--report={kept / 'report.json'}",
        str(DRIVER),
        str(kept / "unfinished.json"),
        str(seconds),
    ]
    command += [str(kept / "source"), shown, *program.arguments]
    paths = os.pathsep.join(
        [str(HERE.parent), str(kept / "source"), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, **_VARIABLES, "PYTHONPATH": paths}
    # What the device lacks runs on the CPU, as by default.
    environment.pop("PYTORCH_ENABLE_MPS_FALLBACK", None)
    ended = {"kind": "no end was noted"}
    try:
        subprocess.run(
            command, cwd=path.parent, env=environment, timeout=25 * seconds, capture_output=True
        )
    except subprocess.TimeoutExpired:
        ended = {"kind": "hung"}
    unfinished = kept / "unfinished.json"
    if not unfinished.exists():
        unfinished.write_text(json.dumps({"ran": {}, "ended": ended}))
    unfinished.replace(kept / "noted.json")


_VARIABLES = {"MPLBACKEND": "Agg", "MASTER_ADDR": "localhost", "MASTER_PORT": "29567"}
_VARIABLES |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""What programs find in their environment: that of a single rank."""


def _raised(event: Event) -> bool:
    return event.said.endswith("[unsupported]")


def _is_of_the_device(end: dict[str, Any]) -> bool:
    """Return whether a program's error is about the device, not a fault of program or data."""
    if end.get("line") is None:
        return False
    if end["kind"] in ("ImportError", "ModuleNotFoundError"):
        return any(f"'{package.partition('.')[0]}" in end["said"] for package in PACKAGES)
    words = re.search(r"mps|cuda|simulated|device", end["said"], re.IGNORECASE)
    return end["kind"] in (*errors.__all__, "NotImplementedError") or words is not None


def _events(
    report: Report | None, noted: dict[str, Any], folder: str, by_default: bool
) -> tuple[list[Event], str]:
    """Return what happened in the program's files, and how the program ended."""
    events = events_of(report) if report is not None else []
    found = [
        event
        for event in events
        if event.file.startswith(folder) and kind_of_file(event.file) == PROGRAM
    ]
    end = noted["ended"]
    reported = any(
        (each.file, each.line) == (end.get("file"), end.get("line"))
        for each in found
        if _raised(each)
    )
    forced = by_default and end.get("kind") in ("RuntimeError", "TypeError")
    if _is_of_the_device(end) and not reported and not forced:
        found.append(Event(end["file"], end["line"], "", f"{end['kind']}: {end['said']}", True))
    return found, f"{end['kind']}: {end.get('said', '')}".rstrip(": ") if end else "ran to its end"


def _counts(finding: Finding, ran: dict[str, set[int]], by_default: bool) -> bool:
    lines = ran.get(os.path.realpath(finding.path), set())
    reached = any(line in lines for line in range(finding.first, finding.last + 1))
    return (
        reached and finding.leaves_trace and not (by_default and finding.verdict is Verdict.HANDLED)
    )


def _kind(verdict: Verdict) -> str:
    return "handled" if verdict is Verdict.HANDLED else "degraded"


def shown(rows: Iterable[dict[str, Any]]) -> str:
    """Return precision and recall of all programs, as text."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["figures"])
    lines = []
    for kind in ("degraded", "handled"):
        right, wrong = total[f"{kind} right"], total[f"{kind} wrong"]
        known, missed = total[f"{kind} predicted"], total[f"{kind} missed"]
        lines.append(
            f"{kind}: precision {right} of {right + wrong}, recall {known} of {known + missed}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predicted", description="Compare check with runs."
    )
    parser.add_argument("clones", type=Path, help="a folder with clones called owner+name")
    parser.add_argument(
        "--seconds", type=int, default=40, help="processor time of a program (default: 40)"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder that keeps what ran, so that only new programs run again",
    )
    parser.add_argument(
        "--only", default="", help="only programs whose path or repository contains this"
    )
    parser.add_argument("--write", action="store_true", help="keep the figures")
    options = parser.parse_args()
    chosen = [each for each in programs() if options.only in f"{each.repository} {each.path}"]
    rows = []
    for program in track(chosen, "programs"):
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(os.path.realpath(options.keep or folder), _slug(program))
            kept.joinpath("source").mkdir(parents=True, exist_ok=True)
            row = measure(program, options.clones, options.seconds, kept)
        rows.append(row)
        print(
            f"{row['repository']} {row['path']}: {row['ended'][:100]}; {row['figures']}", flush=True
        )
        for name in ("wrong", "missed"):
            print(
                *(f"    {name}: {each}" for each in row[name]),
                sep="\n",
                end="\n" if row[name] else "",
            )
    print(shown(rows))
    if options.write:
        FIGURES.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
