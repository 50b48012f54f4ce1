"""The source text of a line of the program, and how its place is written."""

from __future__ import annotations

import linecache
import os

from torchdevice.kernel.python import printable
from torchdevice.kernel.python.library_files import name_inside
from torchdevice.kernel.python.uncaught_errors import ipython

AROUND = 3
"""How many lines are kept on each side of a line."""

_given: dict[str, list[str]] = {}


def remember(file: str, text: str) -> None:
    """Note the text of a program that is in no file, such as that of ``-c``."""
    _given[file] = text.splitlines()


def around(file: str, line: int) -> tuple[int, list[str]]:
    """Return a passage around a line, without blank ends, and the number of its first line.

    The passage is empty where the source is not to be had.
    """
    lines = _given.get(file) or [each.rstrip("\n") for each in linecache.getlines(file)]
    if not 0 < line <= len(lines):
        return line, []
    first = max(1, line - AROUND)
    last = min(len(lines), line + AROUND)
    while first < line and not lines[first - 1].strip():
        first += 1
    while last > line and not lines[last - 1].strip():
        last -= 1
    return first, lines[first - 1 : last]


def place(file: str, line: int) -> str:
    """Return a place for people: relative to the working folder or to installed packages."""
    return f"{short(file)}:{line}"


def short(file: str) -> str:
    """Return a printable file name without meaningless folders; IPython names its cells."""
    session = ipython()
    cell = session.compile.format_code_name(file) if session else None
    if cell:
        return str(cell[1])  # "In[3]"; the first is "Cell"
    file = printable.line(file)
    if not os.path.isabs(file):
        return file
    inside = name_inside(file)
    if inside is not None:
        return inside
    try:
        relative = os.path.relpath(file)
    except (OSError, ValueError):  # the working folder is gone, or on another drive
        return file
    return file if relative.startswith("..") else relative
