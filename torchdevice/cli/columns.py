"""Rows of texts as columns, no word cut in two where the terminal is narrow."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_LEAST = 30
"""The least width of the last column."""


def show(rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Print rows of texts. The last column is wrapped between words, unless the output goes to a file."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    screen = shutil.get_terminal_size((1 << 20, 0)).columns
    for row in rows:
        first = indent + "".join(f"{cell:{width}}  " for cell, width in zip(row, widths, strict=False))
        wrapper = textwrap.TextWrapper(max(screen, len(first) + _LEAST), first, " " * len(first))
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        print(wrapper.fill(row[-1]).rstrip() or first.rstrip())
