"""What was found in a source, as data."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Verdict(enum.Enum):
    """What a line means for a target, the most important first."""

    CHANGE = "change"
    """The program must be changed, or raises an error."""
    APPROXIMATE = "approximate"
    """The program runs. It may compute or read other numbers, or take another branch."""
    HANDLED = "handled"
    """The program runs as it is, with the same meaning."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something at a line of a source that concerns a target.

    Attributes:
        path: The file.
        line: Line number in the file, from 1.
        rule: The name of the rule that found it.
        verdict: What it means.
        remedy: What is done about it or what to do, in one sentence.
        column: Column of the first character, from 1.
        text: The source of the line.
        cell: Number of the code cell of a notebook, from 1; 0 elsewhere.
        first: Number of the first line of the statement.
        last: Number of the last line of the statement, or of its header where it has a body.
        leaves_trace: Whether a report of the program's run shows it when the line runs.
    """

    path: str
    line: int
    rule: str
    verdict: Verdict
    remedy: str
    column: int = 1
    text: str = ""
    cell: int = 0
    first: int = 0
    last: int = 0
    leaves_trace: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints of the finding."""
        names = ("path", "line", "rule", "verdict", "remedy", "column", "text")
        return {**{name: getattr(self, name) for name in names}, "verdict": self.verdict.value}
