"""A bar for what takes long, on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items, and show how many are done. What is printed meanwhile stays on stdout.

    Args:
        items: What is gone through.
        what: What the bar says.
    """
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress

    # Where stdout is a terminal too, rich prints above the bar; where it is a file, it must get
    # what is printed.
    with Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()
    ) as bar:
        yield from bar.track(items, description=what)
