"""The report in every form that it is shown in."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import TYPE_CHECKING, TextIO

from torchdevice.foundation import data_files, styled_text
from torchdevice.report import formatting, plain_text, source
from torchdevice.report.content import Content, Totals
from torchdevice.report.rows import Group

if TYPE_CHECKING:
    from rich.text import Text


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Content):
    """What a program asked for and what was done instead, by line of the program.

    ``str(report)`` is text, ``rich.print(report)`` has colours, and a notebook shows a page. The attributes are those
    of what the report says: ``rows``, ``totals``, ``groups``, ``fallbacks``, ``processes``, ``program``, ``target``.
    """

    def to_html(self) -> str:
        """Return one page that needs nothing else: no network, light and dark, sortable, readable on a phone."""
        more = {"text": formatting, "place": source.place, "short": source.short, "Group": Group, "Totals": Totals}
        return data_files.filled(__file__, "page.html", report=self, **more)

    def _repr_html_(self) -> str:
        # In a frame, so that neither the page nor the notebook changes how the other looks.
        return (
            f'<iframe srcdoc="{escape(self.to_html())}" title="torchdevice report" loading="lazy" '
            f'style="width: 100%; height: 40rem; border: 0"></iframe>'
        )

    def __str__(self) -> str:
        return styled_text.plain(plain_text.rendered(self))

    def __rich__(self) -> Text:
        return styled_text.coloured(plain_text.rendered(self))

    def show(self, file: TextIO | None = None) -> None:
        """Print the report: in colours on a terminal, as plain text elsewhere.

        Args:
            file: Where to; None for stdout.
        """
        styled_text.show(plain_text.rendered(self), file)

    def __repr__(self) -> str:
        totals = self.totals
        return f"<torchdevice.Report: {totals.calls} calls at {totals.lines} lines>"
