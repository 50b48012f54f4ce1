"""A journal counts rewritten and supplied calls by the line of the program that made them.

A journal keeps at most ``MAX_ENTRIES`` distinct entries, so its memory is bounded. It counts the
other calls in ``overflow``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal.callers import KINDS, PROGRAM, Site, kind_of, program_frame, site_of

MAX_ENTRIES = 10_000

Key = tuple[int | str | None, ...]
"""Calls with the same key are one entry: frames by their code and instruction, the request and the
result.
"""


@dataclass
class Entry:
    """One request of the program at one site, and its result.

    Attributes:
        site: The line of the program that made the request; where no frame is the program's, the
            line of the library.
        requested: The request: ``"cuda:0"``, ``"autocast(torch.float16)"``.
        done: What was done instead: ``"cpu"``, ``"torch.bfloat16"``.
        fidelity: How close ``done`` comes to the request.
        library: The line of a library that made the request for the program's line; None where the
            program made it.
        count: The number of requests.
        seconds: The time that they took, where it was measured; else 0.
        bytes: The bytes that they read and wrote, where they were counted; else 0.
    """

    site: Site
    requested: str
    done: str
    fidelity: Fidelity
    library: Site | None = None
    count: int = 0
    seconds: float = 0.0
    bytes: int = 0


class Counts(Protocol):
    """The part of a feature in a journal."""

    def clear(self) -> None:
        """Forget everything."""


Part = TypeVar("Part", bound=Counts)


class Journal:
    """Entries aggregated by call site. Thread-safe; counts may lag by a few under contention.

    Attributes:
        overflow: How many events were not kept because there were too many different ones.
        began: Called before the first entry is made.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES):
        self.overflow = 0
        self.began: Callable[[], None] | None = None
        self._max_entries = max_entries
        # Keyed by the id of the code object, whose own hash reads all of its bytecode. ``_codes``
        # keeps the ids valid.
        self._entries: dict[Key, Entry] = {}
        self._codes: dict[int, CodeType] = {}
        self._distances: dict[tuple[int, int], int] = {}
        self._parts: dict[type[Any], Any] = {}

    def record(self, requested: str, done: str, fidelity: Fidelity, above: int = 0) -> Entry | None:
        """Count one event at the program's current line.

        Args:
            requested: The request (see :class:`Entry`).
            done: What was done instead.
            fidelity: How close ``done`` comes to the request.
            above: The number of innermost callers that belong to this package, so that the search
                skips them.

        Returns:
            The entry, whose count is 1 for the first such event at this line; None where the
            journal is full.
        """
        above += 1
        frame = sys._getframe(above)
        while True:
            # Of the entries only those of calls that no library made have such a key.
            key: Key = (id(frame.f_code), frame.f_lasti, requested, done)
            entry = self._entries.get(key)
            if entry is not None:
                entry.count += 1
                return entry
            kind = KINDS.get(frame.f_code.co_filename)
            if kind is None:
                kind = kind_of(frame)
            if kind or frame.f_back is None:
                break
            above += 1
            frame = frame.f_back
        program: FrameType | None = frame if kind is PROGRAM else self._program_of(frame, above)
        if program is not frame:
            key = (*key, *((None,) if program is None else (id(program.f_code), program.f_lasti)))
            entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= self._max_entries:
                self.overflow += 1
                return None
            entry = self._new(
                key, frame, program, Entry(site_of(program or frame), requested, done, fidelity)
            )
        entry.count += 1
        return entry

    def _program_of(self, frame: FrameType, above: int) -> FrameType | None:
        """Return the program's frame above a library's.

        Looking at each frame in between takes long where libraries call each other, so it is done
        once for a line of a library. From then on the program is first looked for as many callers
        above it as it was found then.
        """
        line = id(frame.f_code), frame.f_lasti
        distance = self._distances.get(line)
        if distance == 0:
            return None
        if distance is not None:
            try:
                known = sys._getframe(1 + above + distance)  # 1 for this method itself
            except ValueError:  # the stack is not that deep now
                known = frame
            if KINDS.get(known.f_code.co_filename) is PROGRAM:
                return known
        found, distance = program_frame(frame)
        if len(self._distances) < self._max_entries:
            self._distances[line] = distance if found is not None else 0
            self._codes[id(frame.f_code)] = frame.f_code
        return found

    def _new(self, key: Key, frame: FrameType, program: FrameType | None, entry: Entry) -> Entry:
        if not self._entries and self.began is not None:
            self.began()
        if program is not None and program is not frame:
            entry.library = site_of(frame)
            self._codes[id(program.f_code)] = program.f_code
        self._codes[id(frame.f_code)] = frame.f_code
        return self._entries.setdefault(key, entry)

    def clear(self) -> None:
        """Forget everything: a forked process counts what it does itself."""
        self._entries.clear()
        for part in self._parts.values():
            part.clear()
        self.overflow = 0

    def part(self, kind: type[Part]) -> Part:
        """Return the part of a feature that counts by itself; an empty one the first time."""
        if kind not in self._parts:
            self._parts.setdefault(kind, kind())  # another thread may be faster
        return self._parts[kind]  # type: ignore[no-any-return]

    @property
    def entries(self) -> list[Entry]:
        """All entries, the most frequent one first."""
        # Sorted in a copy, which is made at once: other threads may add to them.
        return sorted(self._entries.values(), key=lambda entry: -entry.count)

    @property
    def degraded(self) -> list[Entry]:
        """The entries that are not exact, the most frequent one first."""
        return [entry for entry in self.entries if entry.fidelity is not Fidelity.EXACT]

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        entries = self.entries
        sites = {(entry.site, entry.requested, entry.done) for entry in entries}
        total = sum(entry.count for entry in entries)
        return (
            f"<Journal: {total} calls at {len(sites)} sites, {len(self.degraded)} of them degraded>"
        )
