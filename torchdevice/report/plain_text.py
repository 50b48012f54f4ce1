"""A report as text, in colours on a terminal."""

from __future__ import annotations

import textwrap
from itertools import groupby

from torchdevice.foundation.fidelity import Fidelity
from torchdevice.foundation.styled_text import Line
from torchdevice.report import formatting, source
from torchdevice.report.content import Content, Totals
from torchdevice.report.rows import Row

_COLOURS = {
    Fidelity.APPROXIMATE: "yellow",
    Fidelity.DOWNCAST: "magenta",
    Fidelity.FELL_BACK: "red",
    Fidelity.UNSUPPORTED: "bold red",
    Fidelity.EXACT: "green",
}


def rendered(report: Content) -> list[Line]:
    """Return the lines of a report."""
    first, *rest = heading(report)
    found: list[Line] = [((line, "" if line.startswith(" ") else "red"),) for line in findings(report)]
    return [((first, "bold"),), *rest, *found, *_rows(report)]


def heading(report: Content) -> list[str]:
    """Return the totals, and what is not in the report."""
    device = f"{report.target} in place of {report.written_for}"
    lines = [f"torchdevice: report of {formatting.program(report)}, run on {device}"]
    if len(report.processes) > 1:
        lines.append(f"  {formatting.plural(len(report.processes), 'process')}")
    lines.extend(f"  {sentence}" for sentence in formatting.missing(report))
    if not report.rows:
        lines.append("  nothing was rewritten or supplied: the program asked for no accelerator")
    if report.verified:
        lines.append(f"  {formatting.verified(report)}")
    for group, rows in report.groups.items():
        lines.append(f"  {group.value}: {formatting.extent(Totals.of(rows))}")
    return lines


def findings(report: Content) -> list[str]:
    """Return what ``verify=`` found."""
    lines = []
    for each in report.findings:
        place = source.place(each.site.file, each.site.line)
        lines += ["", f"{place}: {each.kind}, {formatting.plural(each.count, 'call')}"]
        lines += textwrap.indent(str(each), "  ").splitlines()
    return lines


def _rows(report: Content) -> list[Line]:
    lines: list[Line] = []
    for group, rows in report.groups.items():
        lines += ["", ((group.value.capitalize(), "bold"), (f": {formatting.EXPLANATIONS[group]}", ""))]
        for (place, text), same in groupby(rows, key=lambda row: (row.place, row.source)):
            lines.append(((f"  {place}", "cyan"), (f"  {text}".rstrip(), "")))
            lines.extend(_row(row, report) for row in same)
    return lines


def _row(row: Row, report: Content) -> Line:
    parts = [formatting.costs(row)]
    if row.libraries:
        parts.append(f"by {formatting.libraries(row)}")
    where = formatting.processes(row, report)
    parts.append(f"in {where}" if where else "")
    fidelity = (f"[{row.fidelity.value}]", _COLOURS.get(row.fidelity, "dim"))
    return (f"{row.count:>8,} x {row.asked} -> {row.done} ", ""), fidelity, ("".join(f"  {p}" for p in parts if p), "")
