"""A report as one page of HTML, which ``page.html`` lays out."""

from __future__ import annotations

from html import escape

from torchdevice.foundation import templates
from torchdevice.report import formatting, source
from torchdevice.report.content import Content, Totals
from torchdevice.report.rows import Group


def rendered(report: Content) -> str:
    """Return the page of a report."""
    more = {"text": formatting, "place": source.place, "Group": Group, "Totals": Totals}
    return templates.filled(__file__, "page.html", report=report, **more)


def framed(report: Content) -> str:
    """Return a frame with the page, for a notebook: neither changes how the other looks."""
    return (
        f'<iframe srcdoc="{escape(rendered(report))}" title="torchdevice report" loading="lazy" '
        f'style="width: 100%; height: 40rem; border: 0"></iframe>'
    )
