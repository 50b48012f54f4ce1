"""Compares the findings of ``check`` with what a report says of the program's run."""

from __future__ import annotations

import os
from typing import NamedTuple

from torchdevice.check import Finding, Verdict
from torchdevice.report import Report


class Event(NamedTuple):
    """Something that happened at a line of a program.

    Attributes:
        file: Path of the source file.
        line: Line number, from 1.
        source: The text of the line.
        said: What happened.
        degraded: Whether that is more than another device with the same meaning: an error, or other
            numbers.
    """

    file: str
    line: int
    source: str
    said: str
    degraded: bool


def events_of(report: Report) -> list[Event]:
    """Return what a report says happened."""
    return [
        Event(
            row.file,
            row.line,
            row.source,
            f"{row.asked} -> {row.done} [{row.fidelity.value}]",
            row.fidelity.changes_numbers or row.fidelity.value == "unsupported",
        )
        for row in report.rows
    ]


def covers(finding: Finding, event: Event) -> bool:
    """Return whether a finding says what an event is.

    A finding that is called handled says nothing of an event that is more than another device with
    the same meaning.
    """
    if not _is_at(finding, event):
        return False
    return finding.verdict is not Verdict.HANDLED or not event.degraded


def predicts(finding: Finding, event: Event) -> bool:
    """Return whether an event shows that a finding is right."""
    return _is_at(finding, event) and (finding.verdict is not Verdict.HANDLED) is event.degraded


def _is_at(finding: Finding, event: Event) -> bool:
    # A graph is compiled where its function is called.
    if finding.rule == "compile" and event.said.startswith("torch.compile with "):
        return True
    same_file = os.path.realpath(finding.path) == os.path.realpath(event.file)
    return same_file and finding.first <= event.line <= finding.last
