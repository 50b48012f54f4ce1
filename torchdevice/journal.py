"""A journal counts rewritten and supplied calls by the line of the program that made them.

A journal keeps at most ``MAX_ENTRIES`` distinct entries, so its memory is bounded. It counts the other calls in
``overflow``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType

import torch

from torchdevice.fidelity import Fidelity

MAX_ENTRIES = 10_000


@dataclass(frozen=True)
class Site:
    """A line of the program.

    Attributes:
        file: Path of the source file, ``co_filename`` of the code object.
        line: Line number, from 1.
        function: Qualified name of the function.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass
class Entry:
    """One request of the program at one site, and what was done for it.

    Attributes:
        site: The line that made the request.
        requested: The request: ``"cuda:0"``, ``"autocast(torch.float16)"``.
        done: What was done instead: ``"cpu"``, ``"torch.bfloat16"``.
        fidelity: How close ``done`` comes to the request.
        count: The number of requests.
    """

    site: Site
    requested: str
    done: str
    fidelity: Fidelity
    count: int = 0


class Journal:
    """Entries aggregated by call site. Safe to use from several threads; counts may lag by a few under contention."""

    def __init__(self, max_entries: int = MAX_ENTRIES):
        self.overflow = 0
        self._max_entries = max_entries
        # Keyed by the id of the code object, whose own hash reads all of its bytecode. ``_codes`` keeps the ids valid.
        self._entries: dict[tuple[int, int, str, str], Entry] = {}
        self._codes: dict[int, CodeType] = {}

    def record(
        self, requested: str, done: str, fidelity: Fidelity, frame: FrameType | None = None, *, above: int = 0
    ) -> bool:
        """Count one event at the program's current line.

        Args:
            requested: The request (see :class:`Entry`).
            done: What was done instead.
            fidelity: How close ``done`` comes to the request.
            frame: The program's frame; None to search for it.
            above: The number of innermost callers that belong to this package, so that the search skips them.

        Returns:
            True for the first such event at this line.
        """
        frame = frame or user_frame(above)
        key = (id(frame.f_code), frame.f_lasti, requested, done)
        entry = self._entries.get(key)
        first = entry is None
        if entry is None:
            if len(self._entries) >= self._max_entries:
                self.overflow += 1
                return False
            site = Site(frame.f_code.co_filename, frame.f_lineno, _function_name(frame.f_code))
            self._codes[id(frame.f_code)] = frame.f_code
            entry = self._entries.setdefault(key, Entry(site, requested, done, fidelity))
        entry.count += 1
        return first

    @property
    def entries(self) -> list[Entry]:
        """All entries, the most frequent one first."""
        return sorted(self._entries.values(), key=lambda entry: -entry.count)

    @property
    def degraded(self) -> list[Entry]:
        """The entries that are not exact, the most frequent one first."""
        return [entry for entry in self.entries if entry.fidelity is not Fidelity.EXACT]

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        total = sum(entry.count for entry in self._entries.values())
        return f"<Journal: {total} calls at {len(self._entries)} sites, {len(self.degraded)} of them degraded>"


def _function_name(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # co_qualname came with Python 3.11


_LIBRARY_FOLDERS = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__ or "", __file__))
_is_library: dict[str, bool] = {}


def user_frame(above: int = 0) -> FrameType:
    """Return the innermost frame outside torch and this package, or the outermost frame if there is none.

    Args:
        above: The number of innermost callers to skip.
    """
    frame = sys._getframe(1 + above)
    while True:
        file = frame.f_code.co_filename
        library = _is_library.get(file)
        if library is None:
            if len(_is_library) > MAX_ENTRIES:
                _is_library.clear()
            library = _is_library[file] = file.startswith(_LIBRARY_FOLDERS)
        if not library or frame.f_back is None:
            return frame
        frame = frame.f_back
