"""The report in all its forms: text, terminal colours, and a page."""

from __future__ import annotations

import dataclasses
import textwrap
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, TextIO

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.python import data_files, styled_text
from torchdevice.kernel.python.styled_text import Line
from torchdevice.report import formatting, source
from torchdevice.report.content import Content, Row, Totals

if TYPE_CHECKING:
    from rich.text import Text


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
    found: list[Line] = [
        ((line, "" if line.startswith(" ") else "red"),) for line in findings(report)
    ]
    return [((first, "bold"),), *rest, *found, *_rows(report)]


def heading(report: Content) -> list[str]:
    """Return the totals, and the parts that the report lacks."""
    device = f"{formatting.target(report)} in place of {report.written_for}"
    lines = [f"torchdevice: report of {formatting.program(report)}, run on {device}"]
    if formatting.participants(report):
        lines.append(f"  {formatting.participants(report)}")
    lines.extend(f"  {sentence}" for sentence in formatting.missing(report))
    if not report.rows:
        lines.append("  nothing was rewritten or supplied: the program asked for no accelerator")
    if report.verified:
        lines.append(f"  {formatting.verified(report)}")
    for group, rows in report.groups.items():
        lines.append(f"  {group.value}: {formatting.extent(Totals.of(rows))}")
    return lines


def findings(report: Content) -> list[str]:
    """Return the findings of ``verify=``."""
    lines = []
    for each in report.findings:
        place = source.place(each.site.file, each.site.line)
        lines += ["", f"{place}: {each.kind}, {formatting.plural(each.count, 'call')}"]
        lines += textwrap.indent(str(each), "  ").splitlines()
    return lines


def _rows(report: Content) -> list[Line]:
    lines: list[Line] = []
    for group, rows in report.groups.items():
        lines += [
            "",
            ((group.value.capitalize(), "bold"), (f": {formatting.EXPLANATIONS[group]}", "")),
        ]
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
    return (
        (f"{row.count:>8,} x {formatting.exchange(row)} ", ""),
        fidelity,
        ("".join(f"  {p}" for p in parts if p), ""),
    )


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Content):
    """The requests of a program and their results, by line of the program.

    ``str(report)`` is text, ``rich.print(report)`` has colours, and a notebook shows a page. The
    attributes are the report's data: ``rows``, ``totals``, ``groups``, ``fallbacks``,
    ``processes``, ``program``, ``target``.
    """

    def to_html(self) -> str:
        """Return a self-contained page: offline, light and dark, sortable, readable on a phone."""
        more = {"text": formatting, "place": source.place, "short": source.short, "Totals": Totals}
        return data_files.filled(__file__, "page.html", report=self, **more)

    def _repr_html_(self) -> str:
        # In a frame, so that neither the page nor the notebook changes how the other looks.
        return (
            f'<iframe srcdoc="{escape(self.to_html())}" title="torchdevice report" loading="lazy" '
            'style="width: 100%; height: 40rem; border: 0"></iframe>'
        )

    def __str__(self) -> str:
        return styled_text.plain(rendered(self))

    def __rich__(self) -> Text:
        return styled_text.coloured(rendered(self))

    def show(self, file: TextIO | None = None) -> None:
        """Print the report: in colours on a terminal, as plain text elsewhere.

        Args:
            file: Where to; None for stdout.
        """
        styled_text.show(rendered(self), file)

    def __repr__(self) -> str:
        totals = self.totals
        return f"<torchdevice.Report: {totals.calls} calls at {totals.lines} lines>"
