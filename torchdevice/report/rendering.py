"""The report in every form that it is shown in."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TextIO

from torchdevice.foundation import styled_text
from torchdevice.report.content import Content

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
        from torchdevice.report import page

        return page.rendered(self)

    def _repr_html_(self) -> str:
        from torchdevice.report import page

        return page.framed(self)

    def __str__(self) -> str:
        return styled_text.plain(self._lines())

    def __rich__(self) -> Text:
        return styled_text.coloured(self._lines())

    def _lines(self) -> list[styled_text.Line]:
        from torchdevice.report import plain_text

        return plain_text.rendered(self)

    def show(self, file: TextIO | None = None) -> None:
        """Print the report: in colours on a terminal, as plain text elsewhere.

        Args:
            file: Where to; None for stdout.
        """
        styled_text.show(self._lines(), file)

    def __repr__(self) -> str:
        totals = self.totals
        return f"<torchdevice.Report: {totals.calls} calls at {totals.lines} lines>"
