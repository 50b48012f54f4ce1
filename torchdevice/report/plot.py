"""A plot of the time by operator that left the device, as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from torchdevice.report import formatting
from torchdevice.report.content import Totals

_MOST = 15
_BAR, _STEP = 10, 40


def bars(operators: Mapping[str, Totals]) -> str:
    """Return a bar for each operator, the longest first. Lengths are in percent, so that the text keeps its size."""
    shown = list(operators.items())[:_MOST]
    longest = max(totals.seconds for _, totals in shown)
    drawn = "".join(_bar(number, name, totals, longest) for number, (name, totals) in enumerate(shown))
    rest = len(operators) - len(shown)
    more = f"; {formatting.plural(rest, 'more operator')} not drawn" if rest else ""
    label = f"time by operator that left the device{more}"
    return f'<svg role="img" aria-label="{label}" height="{_STEP * len(shown)}">{drawn}</svg>'


def _bar(number: int, name: str, totals: Totals, longest: float) -> str:
    top = number * _STEP
    parts = (
        formatting.duration(totals.seconds),
        formatting.plural(totals.calls, "call"),
        formatting.size(totals.bytes),
    )
    figures = ", ".join(parts)
    width = max(0.5, 100 * totals.seconds / longest)
    return (
        f'<text x="0" y="{top + 16}">{escape(name)}</text>'
        f'<text x="100%" y="{top + 16}" text-anchor="end" class="figure">{escape(figures)}</text>'
        f'<rect x="0" y="{top + 22}" width="{width:.2f}%" height="{_BAR}"/>'
    )
