"""A report as a table in colours. This is imported only when one is shown: it needs rich."""

from __future__ import annotations

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torchdevice.foundation.fidelity import Fidelity
from torchdevice.report import formatting, plain_text
from torchdevice.report.content import Content
from torchdevice.report.rows import Row

_COLOURS = {
    Fidelity.APPROXIMATE: "yellow",
    Fidelity.DOWNCAST: "magenta",
    Fidelity.FELL_BACK: "red",
    Fidelity.UNSUPPORTED: "bold red",
    Fidelity.EXACT: "green",
}


def rendered(report: Content) -> RenderableType:
    """Return what rich prints for a report."""
    first, *rest = plain_text.heading(report)
    head = [Text(first, style="bold"), *map(Text, rest)]
    head += [Text(line, style="red" if line and line[0] != " " else "") for line in plain_text.findings(report)]
    return Stack(*head, *(_table(title, rows, report) for title, rows in _titled(report)), *_comparison(report))


def _titled(report: Content) -> list[tuple[str, tuple[Row, ...]]]:
    return [(formatting.HEADINGS[group], rows) for group, rows in report.groups.items()]


def _table(title: str, rows: tuple[Row, ...], report: Content) -> Table:
    table = _titled_table(title)
    table.add_column("line", ratio=5, overflow="fold")
    table.add_column("asked, and done", ratio=3, overflow="fold")
    table.add_column("fidelity")
    table.add_column("count", justify="right")
    costly = any(formatting.costs(row) for row in rows)
    if costly:
        table.add_column("time, bytes", justify="right")
    for row in rows:
        cells = [_line(row, report), Text(f"{row.asked} → {row.done}")]
        cells += [Text(row.fidelity.value, style=_COLOURS.get(row.fidelity, "dim")), Text(f"{row.count:,}")]
        table.add_row(*cells, *([Text(formatting.costs(row))] if costly else []))
    return table


def _titled_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", expand=True, box=None, padding=(0, 2, 0, 0))


def _line(row: Row, report: Content) -> Text:
    line = Text(row.place, style="cyan")
    line.append(f"  {row.source}", style="default")
    for word, text_ in (("by", formatting.libraries(row)), ("in", formatting.processes(row, report))):
        if text_:
            line.append(f"\n{word} {text_}", style="dim")
    return line


def _comparison(report: Content) -> list[RenderableType]:
    if report.comparison is None:
        return []
    parts: list[RenderableType] = [Text(f"\n{formatting.FORETOLD}", style="bold")]
    for title, lines in report.comparison.groups.items():
        table = _titled_table(title)
        table.add_column("line", ratio=1, overflow="fold")
        table.add_column("what", ratio=1, overflow="fold")
        for each in lines:
            table.add_row(Text.assemble((formatting.place(each), "cyan"), f"  {each.source}"), Text(each.said))
        parts.append(table)
    return [*parts, *map(Text, formatting.untraced(report.comparison))]
