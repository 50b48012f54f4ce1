"""A report as one page of HTML, which ``page.html`` lays out."""

from __future__ import annotations

import functools
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from torchdevice.report import formatting, source
from torchdevice.report.content import Content, Totals
from torchdevice.report.rows import Group


def rendered(report: Content) -> str:
    """Return the page of a report."""
    return _template().render(report=report, text=formatting, place=source.place, Group=Group, Totals=Totals)


def framed(report: Content) -> str:
    """Return a frame with the page, for a notebook: neither changes how the other looks."""
    return (
        f'<iframe srcdoc="{escape(rendered(report))}" title="torchdevice report" loading="lazy" '
        f'style="width: 100%; height: 40rem; border: 0"></iframe>'
    )


@functools.cache
def _template() -> Template:
    folder = FileSystemLoader(Path(__file__).parent)
    # Blocks leave no empty lines, and a misspelt name raises instead of showing nothing.
    environment = Environment(
        loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html")
