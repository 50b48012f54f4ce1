"""What was predicted from the source of a program beside what happened when it ran, as data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Line:
    """What was predicted of a line, or what happened at it.

    Attributes:
        file: Path of the source file.
        line: Line number, from 1.
        source: The text of the line.
        said: What was predicted or happened, in a sentence.
    """

    file: str
    line: int
    source: str
    said: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was predicted beside what happened.

    Attributes:
        happened: What was predicted and happened.
        absent: What was predicted and did not happen, perhaps because the program did not get there.
        unforeseen: What happened and was not predicted.
        untraced: How many findings are of a kind that no report shows, such as branches.
    """

    happened: tuple[Line, ...]
    absent: tuple[Line, ...]
    unforeseen: tuple[Line, ...]
    untraced: int

    @property
    def groups(self) -> dict[str, tuple[Line, ...]]:
        """The lines by what a report calls them; without groups that have none."""
        found = {
            "predicted, and happened": self.happened,
            "predicted, and did not happen, or was not reached": self.absent,
            "happened, and was not predicted": self.unforeseen,
        }
        return {title: lines for title, lines in found.items() if lines}
