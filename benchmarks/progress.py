"""A bar for what takes long, on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")


def track(items: Sequence[T], what: str, console: Console | None = None) -> Iterator[T]:
    """Yield the items, and show how many are done. What is printed meanwhile stays on stdout.

    Args:
        items: What is gone through.
        what: What the bar says.
        console: Where the bar is; stderr if left out.
    """
    console = console or Console(stderr=True)
    shown = console.is_terminal
    # Where stdout is a terminal too, rich prints above the bar; where it is a file, it must get what is printed.
    with Progress(console=console, transient=True, disable=not shown, redirect_stdout=sys.stdout.isatty()) as bar:
        yield from bar.track(items, description=what)
