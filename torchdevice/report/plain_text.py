"""A report as plain text."""

from __future__ import annotations

import textwrap
from itertools import groupby

from torchdevice.report import formatting, source
from torchdevice.report.content import Content, Totals
from torchdevice.report.rows import Row


def rendered(report: Content) -> str:
    """Return the text of a report, without a line break at its end."""
    return "\n".join([*heading(report), *findings(report), *_rows(report), *_comparison(report)])


def heading(report: Content) -> list[str]:
    """Return the totals, and what is not in the report."""
    lines = [f"torchdevice: report of {formatting.program(report)}, run on {formatting.device(report)}"]
    if len(report.processes) > 1:
        lines.append(f"  {formatting.plural(len(report.processes), 'process')}")
    lines.extend(f"  {sentence}" for sentence in formatting.missing(report))
    if not report.rows:
        lines.append("  nothing was rewritten or supplied: the program asked for no accelerator")
    if report.verified:
        lines.append(f"  {formatting.verified(report)}")
    for group, rows in report.groups.items():
        lines.append(f"  {formatting.HEADINGS[group].lower()}: {formatting.extent(Totals.of(rows))}")
    return lines


def findings(report: Content) -> list[str]:
    """Return what ``verify=`` found."""
    lines = []
    for each in report.findings:
        place = source.place(each.site.file, each.site.line)
        lines += ["", f"{place}: {each.kind}, {formatting.plural(each.count, 'call')}"]
        lines += textwrap.indent(str(each), "  ").splitlines()
    return lines


def _rows(report: Content) -> list[str]:
    lines = []
    for group, rows in report.groups.items():
        lines += ["", f"{formatting.HEADINGS[group]}: {formatting.EXPLANATIONS[group]}"]
        for (place, text), same in groupby(rows, key=lambda row: (row.place, row.source)):
            lines.append(f"  {place}  {text}".rstrip())
            lines.extend(_row(row, report) for row in same)
    return lines


def _row(row: Row, report: Content) -> str:
    parts = [f"{row.count:>8,} x {row.asked} -> {row.done} [{row.fidelity.value}]", formatting.costs(row)]
    if row.libraries:
        parts.append(f"by {formatting.libraries(row)}")
    where = formatting.processes(row, report)
    parts.append(f"in {where}" if where else "")
    return "  ".join(part for part in parts if part)


def _comparison(report: Content) -> list[str]:
    if report.comparison is None:
        return []
    lines = ["", formatting.FORETOLD]
    for title, group in report.comparison.groups.items():
        lines.append(f"  {title}: {formatting.plural(len({(each.file, each.line) for each in group}), 'line')}")
        for (place, line), same in groupby(group, key=lambda each: (formatting.place(each), each.source)):
            lines.append(f"    {place}  {line}".rstrip())
            lines.extend(f"        {each.said}" for each in same)
    return [*lines, *(f"  {sentence}" for sentence in formatting.untraced(report.comparison))]
