"""What was foretold from the source of a program beside what happened when it ran, as data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Line:
    """What was foretold of a line, or what happened at it.

    Attributes:
        file: Path of the source file.
        line: Line number, from 1.
        source: The text of the line.
        said: What was foretold or happened, in a sentence.
    """

    file: str
    line: int
    source: str
    said: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was foretold beside what happened.

    Attributes:
        happened: What was foretold and happened.
        absent: What was foretold and did not happen, perhaps because the program did not get there.
        unforeseen: What happened and was not foretold.
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
            "foretold, and happened": self.happened,
            "foretold, and did not happen, or was not reached": self.absent,
            "happened, and was not foretold": self.unforeseen,
        }
        return {title: lines for title, lines in found.items() if lines}
