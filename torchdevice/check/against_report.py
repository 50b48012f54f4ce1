"""Compares what was predicted from sources with what a report says of the program's run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import NamedTuple

from torchdevice.check import sources
from torchdevice.check.checker import check_file, check_source
from torchdevice.check.findings import Finding, Verdict
from torchdevice.check.target import Target
from torchdevice.report import Report, source
from torchdevice.report.predicted import Comparison, Line


class Event(NamedTuple):
    """Something that happened at a line of a program.

    Attributes:
        file: Path of the source file.
        line: Line number, from 1.
        source: The text of the line.
        said: What happened.
        degraded: Whether that is more than another device with the same meaning: an error, or other numbers.
    """

    file: str
    line: int
    source: str
    said: str
    degraded: bool


def compared(report: Report, files: Iterable[str], target: Target, ended: Iterable[Event] = ()) -> Report:
    """Return a report with what was predicted of some files beside what happened.

    Args:
        report: What happened.
        files: The sources of the program. Those that the report names are checked too.
        target: The device that stood in.
        ended: The error that ended the program.
    """
    events = [*events_of(report), *ended]
    wanted = {os.path.realpath(file): file for file in (*files, *(event.file for event in events))}
    findings = [finding for file in sorted(wanted.values()) for finding in _findings(file, target)]
    return dataclasses.replace(report, comparison=compare(findings, events))


def _findings(file: str, target: Target) -> list[Finding]:
    """Return what was predicted of a file, or of a program that is in no file. A notebook's report has other lines."""
    text = source.remembered(file)
    if text is not None:
        return check_source(sources.program(file, text.encode()), target)
    return check_file(file, target) if os.path.isfile(file) and not file.endswith(sources.NOTEBOOK) else []


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


def compare(findings: Iterable[Finding], events: Iterable[Event]) -> Comparison:
    """Return which findings happened, which did not, and which events no finding predicted.

    An event belongs to the findings of its statement, and a graph, which is compiled where its function is called, to
    those of ``torch.compile``. An event that is more than another device with the same meaning belongs only to those
    that are not called handled.
    """
    findings, events = list(findings), list(events)
    came = [finding for finding in findings if any(predicts(finding, event) for event in events)]
    away = [finding for finding in findings if finding not in came]
    unforeseen = [event for event in events if not any(covers(finding, event) for finding in findings)]
    return Comparison(
        happened=tuple(map(_line, came)),
        absent=tuple(_line(finding) for finding in away if finding.leaves_trace),
        unforeseen=tuple(Line(*event[:4]) for event in unforeseen),
        untraced=sum(not finding.leaves_trace for finding in away),
    )


def covers(finding: Finding, event: Event) -> bool:
    """Return whether a finding says what an event is."""
    if not _is_at(finding, event):
        return False
    return finding.verdict is not Verdict.HANDLED or not event.degraded


def predicts(finding: Finding, event: Event) -> bool:
    """Return whether an event shows that a finding is right."""
    return _is_at(finding, event) and (finding.verdict is not Verdict.HANDLED) is event.degraded


def _is_at(finding: Finding, event: Event) -> bool:
    if finding.rule == "compile" and event.said.startswith("torch.compile with "):
        return True
    same_file = os.path.realpath(finding.path) == os.path.realpath(event.file)
    return same_file and finding.first <= event.line <= finding.last


def _line(finding: Finding) -> Line:
    return Line(finding.path, finding.line, finding.text, f"{finding.verdict.value}: {finding.remedy} [{finding.rule}]")
