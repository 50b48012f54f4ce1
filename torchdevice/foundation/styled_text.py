"""Lines of text in colours on a terminal, and plain elsewhere. rich is imported only where colours are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.text import Text

Line = str | tuple[tuple[str, str], ...]
"""A line: a text, or parts of it with a style of rich each."""


def _parts(line: Line) -> Iterable[tuple[str, str]]:
    return ((line, ""),) if isinstance(line, str) else line


def plain(lines: Iterable[Line]) -> str:
    """Return lines as a text without colours."""
    return "\n".join("".join(text for text, _ in _parts(line)) for line in lines)


def coloured(lines: Iterable[Line]) -> Text:
    """Return lines as rich prints them."""
    from rich.text import Text

    return Text("\n").join(Text.assemble(*_parts(line)) for line in lines)


def show(lines: Iterable[Line], file: TextIO | None = None) -> None:
    """Print lines, in colours on a terminal.

    Args:
        lines: The lines.
        file: Where to; None for stdout.
    """
    stream = file or sys.stdout
    if not stream.isatty():
        print(plain(lines), file=stream)
        return
    from rich.console import Console

    Console(file=stream).print(coloured(lines))
