"""Makes foreign texts fit to print: file names, messages, reports by others.

A terminal takes some characters for commands: it moves, hides or replaces what was printed before,
sets titles, or writes to the clipboard. Others change the order in which a line is read.
"""

from __future__ import annotations

import re

_COMMANDS = "\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"
"""All that terminals may obey, but neither tabs nor ends of lines."""

_ORDER = "\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"
"""Ends of lines that only some programs know, and marks of the direction of writing."""

_SURROGATES = "\\ud800-\\udfff"
"""Bytes in the name of a file that are no text."""

_IN_LINES = re.compile(f"[{_COMMANDS}{_ORDER}{_SURROGATES}]")
_IN_A_LINE = re.compile(f"[\\n{_COMMANDS}{_ORDER}{_SURROGATES}]")


def line(text: str) -> str:
    """Return a text as one line, with control characters written as escapes."""
    return _IN_A_LINE.sub(_escaped, text)


def lines(text: str) -> str:
    """Return a text of several lines, with other control characters written as escapes."""
    return _IN_LINES.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
