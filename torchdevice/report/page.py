"""A report as one page of HTML that needs nothing else: no network, light and dark, sortable, readable on a phone."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from torchdevice.foundation.fidelity import Fidelity
from torchdevice.report import formatting, plot, source
from torchdevice.report.content import Content, Totals
from torchdevice.report.rows import Group, Row

_CLASSES = {Group.NUMBERS: "numbers", Group.ELSEWHERE: "elsewhere", Group.OTHER: "other"}

_MEANINGS = {
    Fidelity.APPROXIMATE: "a plausible value, or a coarser behaviour",
    Fidelity.DOWNCAST: "kept or computed in another dtype than was asked for",
    Fidelity.FELL_BACK: "the target lacks the operator, which ran on the CPU",
    Fidelity.EXACT: "the same meaning on another device",
    Fidelity.DECLARED: "a documented constant, nothing was measured",
    Fidelity.INERT: "a hint, and nothing to do for it",
    Fidelity.UNSUPPORTED: "an error that names the way out",
}

# The browser itself refuses whatever would be fetched.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def rendered(report: Content) -> str:
    """Return the page of a report."""
    title = f"torchdevice: {formatting.program(report)}"
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_asset('page.css')}</style>",
    ]
    alarms = [f'<p class="alarm" role="alert">{escape(sentence)}</p>' for sentence in formatting.missing(report)]
    body = [_heading(report), *alarms, _tiles(report), _findings(report), _plot(report), _table(report)]
    body += [_comparison(report), _processes(report), _legend(), f"<script>{_asset('page.js')}</script>"]
    opened = ["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", "<body>"]
    return "\n".join([*opened, *filter(None, body), "</body>", "</html>", ""])


def framed(report: Content) -> str:
    """Return a frame with the page, for a notebook: neither changes how the other looks."""
    return (
        f'<iframe srcdoc="{escape(rendered(report))}" title="torchdevice report" loading="lazy" '
        f'style="width: 100%; height: 40rem; border: 0"></iframe>'
    )


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _heading(report: Content) -> str:
    run = f"ran on <b>{escape(report.target)}</b> in place of {escape(report.written_for)}"
    return (
        f"<h1>{escape(formatting.program(report))}</h1>\n"
        f'<p>{run}</p>\n<p class="quiet">{escape(formatting.versions(report))}</p>'
    )


def _tiles(report: Content) -> str:
    tiles = []
    for group in Group:
        totals = Totals.of(report.groups.get(group, ()))
        tiles.append(_tile(_CLASSES[group], formatting.HEADINGS[group], f"{totals.calls:,}", _at(totals)))
    if report.fallbacks:
        off = Totals.of(row for row in report.rows if row.seconds)
        tiles.append(_tile("time", "Off the device", formatting.duration(off.seconds), formatting.size(off.bytes)))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(kind: str, title: str, figure: str, detail: str) -> str:
    return f'<div class="tile {kind}">{title}<b>{figure}</b><span class="quiet">{detail}</span></div>'


def _at(totals: Totals) -> str:
    calls = "call" if totals.calls == 1 else "calls"
    return f"{calls} at {formatting.plural(totals.lines, 'line')}"


def _findings(report: Content) -> str:
    """Return what ``verify=`` found; nothing without it."""
    if not report.verified:
        return ""
    found = "".join(
        f'<div class="alarm"><div class="place">{escape(source.place(each.site.file, each.site.line))} in '
        f"{escape(each.site.function)}: {escape(each.kind)}, {formatting.plural(each.count, 'call')}</div>"
        f"<pre>{escape(str(each))}</pre></div>"
        for each in report.findings
    )
    return f"<h2>Compared with the CPU</h2>\n<p>{escape(formatting.verified(report))}</p>{found}"


def _plot(report: Content) -> str:
    if not report.fallbacks:
        return ""
    return f"<h2>Time by operator that left the device</h2>\n<figure>{plot.bars(report.fallbacks)}</figure>"


# ---- the table -------------------------------------------------------------------------------------------------------


def _table(report: Content) -> str:
    if not report.rows:
        return '<p class="alarm">Nothing was rewritten or supplied: the program asked for no accelerator.</p>'
    columns = ["line of the program", "asked, and done", "fidelity", "count", "time", "bytes", "processes"]
    shown = [True] * 4 + [any(r.seconds for r in report.rows), any(r.bytes for r in report.rows)]
    shown.append(len(report.processes) > 1)
    heads = "".join(
        f'<th scope="col"><button type="button">{name}</button></th>'
        for name, wanted in zip(columns, shown, strict=True)
        if wanted
    )
    rows = "\n".join(_row(row, report, shown) for row in report.rows)
    return (
        f"<h2>Line by line</h2>\n{_filters(report)}\n"
        f'<table class="rows"><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>'
    )


def _filters(report: Content) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" value="{_CLASSES[group]}" checked>{formatting.HEADINGS[group].lower()}</label>'
        for group in report.groups
    )
    return f'<div class="filters"><input type="search" placeholder="filter" aria-label="filter rows">{boxes}</div>'


def _row(row: Row, report: Content, shown: list[bool]) -> str:
    what = f'{escape(row.asked)} <span class="arrow">→</span> {escape(row.done)}'
    cells = [
        _cell("line", row.place, _line(row)),
        _cell("what", row.asked, what),
        _cell("", row.fidelity.value, f'<span class="badge">{row.fidelity.value}</span>'),
        _cell("number", row.count, f"{row.count:,}", "count"),
        _cell("number", row.seconds, formatting.duration(row.seconds), "time"),
        _cell("number", row.bytes, formatting.size(row.bytes), "bytes"),
        _cell("where", ", ".join(row.processes), escape(formatting.processes(row, report) or "all"), "in"),
    ]
    kind = _CLASSES[row.group]
    chosen = "".join(cell for cell, wanted in zip(cells, shown, strict=True) if wanted)
    return f'<tr class="row {kind}" data-group="{kind}">{chosen}</tr>'


def _cell(kind: str, value: Any, content: str, name: str = "") -> str:
    named = f' data-name="{name}"' if name else ""
    return f'<td class="{kind}" data-value="{escape(str(value))}"{named}>{content}</td>'


def _line(row: Row) -> str:
    """Return the line's source, which opens to the passage around it and the libraries in between."""
    by = f", by {escape(formatting.libraries(row))}" if row.libraries else ""
    place = f'<div class="place">{escape(row.place)} in {escape(row.function)}{by}</div>'
    if not row.passage:
        return place
    numbered = enumerate(row.passage, row.first)
    passage = "".join(_numbered(number, text, number == row.line) for number, text in numbered)
    inside = f"<pre>{passage}</pre>{_libraries(row)}"
    return f"{place}<details><summary><code>{escape(row.source)}</code></summary>{inside}</details>"


def _numbered(number: int, text: str, here: bool) -> str:
    kind = ' class="here"' if here else ""
    return f"<span{kind}><i>{number}</i>{escape(text)}</span>"


def _libraries(row: Row) -> str:
    lines = "".join(
        f"<li>{each.count:,} from {escape(source.place(each.file, each.line))} in {escape(each.function)}</li>"
        for each in row.libraries
    )
    return f"<ul>{lines}</ul>" if lines else ""


# ---- below the table -------------------------------------------------------------------------------------------------


def _comparison(report: Content) -> str:
    """Return what was foretold from the source beside what happened."""
    if report.comparison is None:
        return ""
    parts = [f"<h2>{escape(formatting.FORETOLD.rstrip(':'))}</h2>"]
    for title, lines in report.comparison.groups.items():
        rows = "".join(
            f'<tr><td><div class="place">{escape(formatting.place(each))}</div><code>{escape(each.source)}</code></td>'
            f"<td>{escape(each.said)}</td></tr>"
            for each in lines
        )
        parts.append(f"<h3>{escape(title)}</h3>\n<table><tbody>{rows}</tbody></table>")
    parts += [f'<p class="quiet">{escape(sentence)}</p>' for sentence in formatting.untraced(report.comparison)]
    return "\n".join(parts)


def _processes(report: Content) -> str:
    if len(report.processes) == 1:
        return ""
    rows = "".join(
        f'<tr><td>{escape(each.name)}</td><td class="number">{each.pid}</td>'
        f'<td class="number">{each.calls:,}</td><td>{each.end}</td></tr>'
        for each in report.processes
    )
    heads = '<th>name</th><th class="number">number</th><th class="number">calls</th><th>end</th>'
    return f"<h2>Processes</h2>\n<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _legend() -> str:
    terms = "".join(f"<dt>{fidelity.value}</dt><dd>{meaning}</dd>" for fidelity, meaning in _MEANINGS.items())
    return f"<h2>What the words mean</h2>\n<dl>{terms}</dl>"
