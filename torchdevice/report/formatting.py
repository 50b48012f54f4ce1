"""The sentences of reports of all forms: headings, sums and figures."""

from __future__ import annotations

import os
import re
import shlex
import urllib.parse
from collections.abc import Sequence

from torchdevice.kernel.python import printable
from torchdevice.kernel.python.byte_sizes import scaled
from torchdevice.report import content, source
from torchdevice.report.content import MAIN, Content, Group, Process, Row, Totals
from torchdevice.report.discrepancies import LEFT_OUT

EXPLANATIONS = {
    Group.NUMBERS: (
        "the program may compute or read other numbers: approximate, downcast, fell back"
    ),
    Group.ELSEWHERE: "the same operations with the same meaning, on another device",
    Group.OTHER: "hints with nothing to do, declared constants, and what raised an error",
}


_RANK = re.compile("rank [0-9]+")


def program(report: Content) -> str:
    """Return the command line of a report, without the folders of the program."""
    first, *rest = report.program or ("",)
    if first.endswith("ipykernel_launcher.py"):
        return "a notebook"
    return printable.line(shlex.join([os.path.basename(first) or "python", *rest]))


def target(report: Content) -> str:
    """Return the device that stood in, without the number of simulated devices."""
    if report.target.startswith("simulated:"):
        return report.target.removesuffix(":1")
    return report.target


def exchange(row: Row) -> str:
    """Return a row's request and result; once if they are equal."""
    return row.done if row.done in (row.asked, f"{row.asked}:0") else f"{row.asked} -> {row.done}"


def participants(report: Content) -> str:
    """Return how many ranks and other processes there were; nothing where there was one process."""
    # A launcher of ranks asks for nothing itself.
    names = [
        each.name
        for each in report.processes
        if each.calls > 0 or each.end != "reported" or each.name != MAIN
    ]
    ranks = sum(_RANK.fullmatch(name) is not None for name in names)
    if ranks == 0:
        return plural(len(report.processes), "process") if len(report.processes) > 1 else ""
    others = len(names) - ranks
    return plural(ranks, "rank") + (f" and {plural(others, 'other process')}" if others else "")


def editor_link(row: Row) -> str:
    """Return the address that opens a row's line in an editor. Undecodable names stay bytes."""
    return f"vscode://file{urllib.parse.quote(os.fsencode(row.file))}:{row.line}"


def plural(count: int, noun: str) -> str:
    """Return a number of things."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


def verified(report: Content) -> str:
    """Return how many calls ``verify=`` compared, and the outcome; nothing without ``verify=``."""
    if not report.verified:
        return ""
    calls = {name: sum(counts.values()) for name, counts in report.verified.items()}
    said = (
        f"verified {plural(calls['compared'], 'call')} of "
        f"{plural(len(report.verified['compared']), 'operator')}"
    )
    if calls["random"]:
        said += (
            f", {plural(calls['random'], 'call')} with random numbers by shape, dtype and range "
            "only"
        )
    for why in filter(calls.get, LEFT_OUT):
        operators = plural(len(report.verified[why]), "operator")
        said += f"; not compared: {plural(calls[why], 'call')} of {operators} {LEFT_OUT[why]}"
    return f"{said}: {plural(len(report.findings), 'finding')}"


def extent(totals: Totals) -> str:
    """Return how many calls there were at how many lines, and their time if any was measured."""
    time = f", {duration(totals.seconds)}" if totals.seconds else ""
    return f"{plural(totals.calls, 'call')} at {plural(totals.lines, 'line')}{time}"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it; nothing for none."""
    if not seconds:
        return ""
    if seconds >= 1:
        return _figure(seconds, "s")
    if seconds >= 1e-3:
        return _figure(seconds / 1e-3, "ms")
    return _figure(seconds / 1e-6, "µs")


def size(count: int) -> str:
    """Return a number of bytes in the unit that suits it; nothing for none."""
    if not count:
        return ""
    number, unit = scaled(count)
    return f"{count} B" if unit == "bytes" else _figure(number, unit)


def _figure(value: float, unit: str) -> str:
    """Return a figure with three digits, or with all before the point where these are more."""
    # Which .3g would round to 1e+03.
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"


def costs(row: Row) -> str:
    """Return the time and the bytes of a row, as far as they are known."""
    return ", ".join(part for part in (duration(row.seconds), size(row.bytes)) if part)


def libraries(row: Row) -> str:
    """Return the lines of libraries that asked for the program's line; nothing if it asked."""
    if not row.libraries:
        return ""
    first, *others = row.libraries
    return source.place(first.file, first.line) + (
        f" and {plural(len(others), 'more line')}" if others else ""
    )


def processes(row: Row, report: Content) -> str:
    """Return the processes of a row; nothing if all processes that asked did the same."""
    asking = sum(process.calls > 0 or process.end != "reported" for process in report.processes)
    if len(report.processes) == 1 or len(row.processes) == asking > 1:
        return ""
    return _together(row.processes)


def _together(names: Sequence[str]) -> str:
    """Return names of processes as a person writes them: ``"ranks 0-3"``."""
    # The number behind "rank ".
    ranks = sorted(int(each[5:]) for each in names if _RANK.fullmatch(each))
    if len(ranks) > 1:
        names = [
            f"ranks {content.numbers(ranks)}",
            *(each for each in names if not _RANK.fullmatch(each)),
        ]
    first = ", ".join(names[:4])
    return first if len(names) <= 4 else f"{first} and {len(names) - 4} more"


def missing(report: Content) -> list[str]:
    """Return a sentence per failure and per process that is missing, and for calls left out."""
    ends = {
        "running": "is still running; what it did is not in this report.",
        "lost": "was killed before it could say what it did.",
    }
    failures: dict[str, list[Process]] = {}
    failed = [each for each in report.processes if each.failure]
    # torchrun's error is a table of the ranks that failed, which have sentences of their own.
    ranks = [each for each in failed if _RANK.fullmatch(each.name)]
    for each in failed:
        if ranks and each.name == MAIN and " with ChildFailedError" in each.failure:
            continue
        failures.setdefault(content.without_indices(each.failure), []).append(each)
    said = [_failure(alike) for alike in failures.values()]
    silent = [each for each in report.processes if each.end != "reported"]
    said += [f"{each.name} (process {each.pid}) {ends[each.end]}" for each in silent]
    if report.left_out:
        said.append(
            f"The journal's limit was reached: {plural(report.left_out, 'call')} more, not told "
            "apart."
        )
    return said


def _failure(alike: Sequence[Process]) -> str:
    names = ["the program" if each.name == MAIN else each.name for each in alike]
    # A text of several lines becomes one line.
    failure = " ".join(content.with_all_indices(each.failure for each in alike).split())
    return f"{_together(names)} {failure}"
