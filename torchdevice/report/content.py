"""A report's data: the program's requests and what was done instead, by line of the program.

A row is a request of a line of the program and its result, each kind of thing once.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal.callers import Site
from torchdevice.kernel.journal.journal import Entry, Journal
from torchdevice.kernel.options import Options
from torchdevice.report import source
from torchdevice.report.discrepancies import Finding, findings_of, merged
from torchdevice.version import versions

MAIN = "main"
"""The name of the first process of a run, and of each in the report that it makes of itself."""


class Group(enum.Enum):
    """The meaning of a row for the program. A report shows the groups in this order."""

    NUMBERS = "changed numbers"
    ELSEWHERE = "ran elsewhere"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class LibraryLine(Site):
    """A line of a library that asked on behalf of the program's line, and how often."""

    count: int


@dataclasses.dataclass
class Row:
    """A request of one line of the program, and the result.

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
        """The meaning of the row for the program."""
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
        return {
            **dataclasses.asdict(self),
            "fidelity": self.fidelity.value,
            "group": self.group.value,
        }


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """Return the rows of a journal's entries, in the order in which a report shows them.

    Equal entries of one line are one row.
    """
    alike = _alike(map(_row, entries), str)
    return _ordered([functools.reduce(_sum, each) for each in alike])


def _row(entry: Entry) -> Row:
    site, library = entry.site, entry.library
    first, passage = source.around(site.file, site.line)
    same = {
        name: getattr(entry, name) for name in ("done", "fidelity", "count", "seconds", "bytes")
    }
    libraries = [LibraryLine(**vars(library), count=entry.count)] if library else []
    more: dict[str, Any] = {"asked": entry.requested, "libraries": libraries, "processes": [MAIN]}
    return Row(**vars(site), first=first, passage=passage, **same, **more)


def folded(rows: Iterable[Row]) -> list[Row]:
    """Return rows, in order, merged if only indices of devices differ, as those of ranks."""
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
    texts: dict[str, Any] = {
        name: with_all_indices(getattr(row, name) for row in rows) for name in ("asked", "done")
    }
    return dataclasses.replace(functools.reduce(_sum, rows), **texts)


def without_indices(text: str) -> str:
    """Return a text that is equal for texts which differ in indices of devices alone."""
    return _INDEX.sub("", text)


def with_all_indices(texts: Iterable[str]) -> str:
    """Return one text for such texts, which names the devices of all: ``"cuda:0-3"``."""
    first, *others = dict.fromkeys(texts)
    if not others:
        return first
    indices = {int(index) for text in (first, *others) for index in _INDEX.findall(text)}
    return _INDEX.sub(numbers(sorted(indices)), first)


def numbers(found: Sequence[int]) -> str:
    """Return sorted numbers as a person writes them: ``"0-3"``, or ``"0, 2"``."""
    together = len(found) > 1 and found[-1] - found[0] == len(found) - 1
    return f"{found[0]}-{found[-1]}" if together else ", ".join(map(str, found))


def _ordered(rows: Collection[Row]) -> list[Row]:
    """Return rows by group; in a group the longest time comes first, then the most calls."""
    lines: dict[Any, list[Row]] = {}
    for row in rows:
        lines.setdefault((row.group, row.file, row.line), []).append(row)
    groups = list(Group)

    def rank(row: Row) -> Any:
        line = lines[row.group, row.file, row.line]
        of_line = -sum(each.seconds for each in line), -sum(each.count for each in line)
        in_line = -row.count, row.asked, row.done
        return groups.index(row.group), *of_line, row.file, row.line, *in_line

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


def record(cls: type, data: Any) -> Any:
    """Return a dataclass object with the fields of these data. Other names are ignored.

    Raises:
        KeyError: A field is missing.
        TypeError: Something else stands where a record should be.
    """
    kinds = typing.get_type_hints(cls)
    return cls(
        **{each.name: _value(kinds[each.name], data[each.name]) for each in dataclasses.fields(cls)}
    )


def _value(kind: Any, data: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # such as ``Site | None``
        return None if data is None else _value(inner[0], data)
    if origin in (list, tuple):
        return origin(_value(inner[0], each) for each in data)
    if dataclasses.is_dataclass(kind):
        return record(kind, data)  # type: ignore[arg-type]
    return kind(data) if isinstance(kind, enum.EnumMeta) else data


C = TypeVar("C", bound="Content")

_FORMAT = 1
"""The version of what :meth:`Content.to_dict` returns."""


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a run.

    Attributes:
        name: ``"main"``, ``"rank 1"``, or what multiprocessing calls it.
        pid: Its number.
        end: ``"reported"``; ``"running"`` when the report was made; ``"lost"`` where it was killed
            before it could say what it did.
        calls: How many calls it counted.
        failure: At which line an error ended it, and the error; empty where none did.
        memory: Index of a simulated device -> the highest reserved bytes of the process there.
        allocated: Index of a simulated device -> the highest bytes of its tensors there.
    """

    name: str
    pid: int
    end: str = "reported"
    calls: int = 0
    failure: str = ""
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    allocated: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Figures of the whole report, or of one group of its rows."""

    calls: int
    lines: int
    seconds: float
    bytes: int

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Totals:
        """Return the figures of some rows."""
        rows = list(rows)
        return cls(
            calls=sum(row.count for row in rows),
            lines=len({(row.file, row.line) for row in rows}),
            seconds=sum(row.seconds for row in rows),
            bytes=sum(row.bytes for row in rows),
        )


@dataclasses.dataclass(frozen=True)
class Content:
    """The requests of a program and their results, by line of the program.

    Attributes:
        program: The command line.
        target: The device that stood in.
        written_for: The accelerator that the program is written for.
        versions: Versions of this package, of torch and of Python, and which kernels computed where
            there is a choice.
        rows: The rows, the most important first.
        processes: The processes it happened in.
        left_out: How many calls were not told apart because there were too many different ones.
        findings: What ``verify=`` found.
        verified: How many calls ``verify=`` compared: ``"compared"``, ``"random"`` (shapes, dtypes
            and ranges only) and what was not compared, by the reasons of ``LEFT_OUT`` -> operator
            -> number. Empty without ``verify=``.
        plan: The data of ``torchdevice plan``, with the memory of each device over time. Empty
            under other commands.
    """

    program: tuple[str, ...]
    target: str
    written_for: str
    versions: dict[str, str]
    rows: tuple[Row, ...]
    processes: tuple[Process, ...]
    left_out: int = 0
    findings: tuple[Finding, ...] = ()
    verified: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls: type[C],
        journal: Journal,
        options: Options,
        target: str,
        kernels: str = "",
        memory: Mapping[str, tuple[int, int]] | None = None,
    ) -> C:
        """Return the report of one journal of this process.

        ``memory`` has the highest allocated and reserved bytes by the index of a simulated device.
        """
        memory = memory or {}
        rows = rows_of(journal.entries)
        process = Process(
            MAIN,
            os.getpid(),
            calls=sum(row.count for row in rows) + journal.overflow,
            memory={index: reserved for index, (_, reserved) in memory.items()},
            allocated={index: allocated for index, (allocated, _) in memory.items()},
        )
        return cls(
            program=tuple(sys.argv),
            target=target,
            written_for=options.written_for,
            versions={**versions(), **({"kernels": kernels} if kernels else {})},
            rows=tuple(rows),
            processes=(process,),
            left_out=journal.overflow,
            findings=tuple(findings_of(journal)),
            verified=findings_of(journal).counts() if getattr(options, "verify", None) else {},
        )

    def joined(self: C, others: Iterable[Content], lost: Iterable[Process] = ()) -> C:
        """Return one report of this process and of others.

        Args:
            others: Their reports.
            lost: The processes that made none.
        """
        others = list(others)
        reports: list[Content] = [self, *others]
        rows = folded(row for report in reports for row in report.rows)
        processes = [each for report in reports for each in report.processes]
        findings = merged(each for report in reports for each in report.findings)
        return dataclasses.replace(
            self,
            rows=tuple(rows),
            processes=(*processes, *lost),
            left_out=sum(report.left_out for report in reports),
            findings=tuple(findings),
            verified=_sums(report.verified for report in reports),
        )

    def renamed(self: C, name: str, **changes: Any) -> C:
        """Return the report of one process with another name, or other fields, of the process."""
        rows = tuple(dataclasses.replace(row, processes=[name]) for row in self.rows)
        process = dataclasses.replace(self.processes[0], name=name, **changes)
        return dataclasses.replace(self, rows=rows, processes=(process,))

    @property
    def totals(self) -> Totals:
        """The figures of all rows."""
        return Totals.of(self.rows)

    @property
    def groups(self) -> dict[Group, tuple[Row, ...]]:
        """The rows by their meaning for the program; without groups that have none."""
        found = {group: tuple(row for row in self.rows if row.group is group) for group in Group}
        return {group: rows for group, rows in found.items() if rows}

    @property
    def fallbacks(self) -> dict[str, Totals]:
        """Operators run on the CPU because the target lacks them, with figures, slowest first."""
        names = dict.fromkeys(row.asked for row in self.rows if row.seconds)
        found = {
            name: Totals.of(row for row in self.rows if row.seconds and row.asked == name)
            for name in names
        }
        return dict(sorted(found.items(), key=lambda item: -item[1].seconds))

    @property
    def verification(self) -> dict[str, Any]:
        """What ``verify=`` found and how many calls it compared, as plain data."""
        return {"findings": list(map(dataclasses.asdict, self.findings)), "verified": self.verified}

    # ---- forms -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, which JSON can hold."""
        totals = {
            group.value: dataclasses.asdict(Totals.of(rows)) for group, rows in self.groups.items()
        }
        fields = dataclasses.asdict(self).items()
        return {
            "format": _FORMAT,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in fields},
            "totals": {**dataclasses.asdict(self.totals), **totals},
            "rows": [row.to_dict() for row in self.rows],
        }

    @classmethod
    def from_dict(cls: type[C], data: dict[str, Any]) -> C:
        """Return the report that :meth:`to_dict` described.

        Raises:
            ValueError: The data are not those of a report.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(
                "this is not a report of torchdevice. Use a file that 'run --report=FILE.json' "
                "wrote."
            )
        return record(cls, data)

    def to_json(self, indent: int | None = 1) -> str:
        """Return :meth:`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent)


def _sums(counts: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for each in counts:
        for name, calls in each.items():
            found.setdefault(name, Counter()).update(calls)
    return {name: dict(calls) for name, calls in found.items()}
