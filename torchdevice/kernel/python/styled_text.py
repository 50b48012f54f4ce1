"""Coloured lines for a terminal, plain elsewhere. rich is imported only for colours."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO, TypeVar

from torchdevice.kernel.python import printable

if TYPE_CHECKING:
    from rich.text import Text

T = TypeVar("T")

Line = str | tuple[tuple[str, str], ...]
"""A line: a text, or parts of it with a style of rich each."""


def _parts(line: Line) -> Iterable[tuple[str, str]]:
    """Yield a line's parts; foreign texts can neither control the terminal nor add lines."""
    parts = ((line, ""),) if isinstance(line, str) else line
    return ((printable.line(text), style) for text, style in parts)


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


def counted(items: Iterable[T], number: int, done: str) -> Iterator[T]:
    """Yield items, and count them in a line on stderr, if it is a terminal, until the last.

    Args:
        items: The items.
        number: How many there will be.
        done: The words for them, such as ``"files checked"``.
    """
    for count, item in enumerate(items, 1):
        if sys.stderr.isatty():
            end = "\r\033[K" if count == number else ""
            print(f"\r{count:,} of {number:,} {done}", end=end, file=sys.stderr, flush=True)
        yield item
