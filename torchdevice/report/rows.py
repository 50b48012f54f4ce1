"""The rows of a report: what a line of the program asked for and what was done, each kind of thing once."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torchdevice.foundation.fidelity import Fidelity
from torchdevice.journal.callers import Site
from torchdevice.journal.journal import Entry
from torchdevice.report import source

MAIN = "main"
"""The name of the first process of a run, and of each in the report that it makes of itself."""


class Group(enum.Enum):
    """What a row means for the program. A report shows the groups in this order."""

    NUMBERS = "changed numbers"
    ELSEWHERE = "ran elsewhere"
    OTHER = "the rest"


@dataclasses.dataclass(frozen=True)
class LibraryLine(Site):
    """A line of a library that asked on behalf of the program's line, and how often."""

    count: int


@dataclasses.dataclass
class Row:
    """What one line of the program asked for, and what was done.

    Attributes:
        file: Path of the source file.
        line: Line number, from 1.
        function: Qualified name of the function.
        first: Number of the first line of ``passage``.
        passage: The source around the line; empty where it is not to be had.
        asked: What was asked for.
        done: What was done instead.
        fidelity: How close that is.
        count: How often.
        seconds: How long it took altogether, where that was measured; else 0.
        bytes: How many bytes were read and written, where they were counted; else 0.
        libraries: The lines of libraries that asked on behalf of the line, the most frequent first.
        processes: The names of the processes in which it happened.
    """

    file: str
    line: int
    function: str
    first: int
    passage: list[str]
    asked: str
    done: str
    fidelity: Fidelity
    count: int
    seconds: float
    bytes: int
    libraries: list[LibraryLine]
    processes: list[str]

    @property
    def group(self) -> Group:
        """What the row means for the program."""
        if self.fidelity.changes_numbers:
            return Group.NUMBERS
        return Group.ELSEWHERE if self.fidelity is Fidelity.EXACT else Group.OTHER

    @property
    def source(self) -> str:
        """The text of the line; empty where it is not to be had."""
        offset = self.line - self.first
        return self.passage[offset].strip() if 0 <= offset < len(self.passage) else ""

    @property
    def place(self) -> str:
        """Where the line is, as a person writes it."""
        return source.place(self.file, self.line)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {**dataclasses.asdict(self), "fidelity": self.fidelity.value, "group": self.group.value}


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """Return the rows of a journal's entries, in the order in which a report shows them.

    Entries that say the same of the same line are one row.
    """
    return _ordered([functools.reduce(_sum, alike) for alike in _alike(map(_row, entries), str)])


def _row(entry: Entry) -> Row:
    site, library = entry.site, entry.library
    first, passage = source.around(site.file, site.line)
    same = {name: getattr(entry, name) for name in ("done", "fidelity", "count", "seconds", "bytes")}
    libraries = [LibraryLine(**vars(library), count=entry.count)] if library else []
    more: dict[str, Any] = {"asked": entry.requested, "libraries": libraries, "processes": [MAIN]}
    return Row(**vars(site), first=first, passage=passage, **same, **more)


def folded(rows: Iterable[Row]) -> list[Row]:
    """Return rows with those made one that differ in indices of devices alone, as those of ranks do, in that order."""
    return _ordered([_one_of(alike) for alike in _alike(rows, without_indices)])


def _alike(rows: Iterable[Row], compared: Callable[[str], str]) -> Collection[list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = row.file, row.line, compared(row.asked), compared(row.done), row.fidelity
        found.setdefault(key, []).append(row)
    return found.values()


_INDEX = re.compile(r"(?<=[a-z]:)(?<!\.py:)\d+")  # of "cuda:1", and not the line of "train.py:1"


def _one_of(rows: Sequence[Row]) -> Row:
    """Return the sum of rows, with the devices of all."""
    texts: dict[str, Any] = {name: with_all_indices(getattr(row, name) for row in rows) for name in ("asked", "done")}
    return dataclasses.replace(functools.reduce(_sum, rows), **texts)


def without_indices(text: str) -> str:
    """Return a text that is equal for texts which differ in indices of devices alone."""
    return _INDEX.sub("", text)


def with_all_indices(texts: Iterable[str]) -> str:
    """Return one text for such texts, which names the devices of all: ``"cuda:0-3"``."""
    first, *others = dict.fromkeys(texts)
    indices = sorted({int(index) for text in (first, *others) for index in _INDEX.findall(text)})
    return _INDEX.sub(numbers(indices), first) if others else first


def numbers(found: Sequence[int]) -> str:
    """Return sorted numbers as a person writes them: ``"0-3"``, or ``"0, 2"``."""
    together = len(found) > 1 and found[-1] - found[0] == len(found) - 1
    return f"{found[0]}-{found[-1]}" if together else ", ".join(map(str, found))


def _ordered(rows: Collection[Row]) -> list[Row]:
    """Return rows by group; in a group the lines with the longest time first, then those with the most calls."""
    lines: dict[Any, list[Row]] = {}
    for row in rows:
        lines.setdefault((row.group, row.file, row.line), []).append(row)
    groups = list(Group)

    def rank(row: Row) -> Any:
        line = lines[row.group, row.file, row.line]
        weight = -sum(each.seconds for each in line), -sum(each.count for each in line)
        return groups.index(row.group), *weight, row.file, row.line, -row.count, row.asked, row.done

    return sorted(rows, key=rank)


def _sum(one: Row, other: Row) -> Row:
    counts: Counter[tuple[str, int, str]] = Counter()
    for each in (*one.libraries, *other.libraries):
        counts[each.file, each.line, each.function] += each.count
    return dataclasses.replace(
        one,
        count=one.count + other.count,
        seconds=one.seconds + other.seconds,
        bytes=one.bytes + other.bytes,
        libraries=[LibraryLine(*key, count) for key, count in counts.most_common()],
        processes=list(dict.fromkeys((*one.processes, *other.processes))),
    )
