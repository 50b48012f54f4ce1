"""What happened, and where: a journal counts rewritten and supplied calls by the line of the program that made them.

A journal keeps at most ``MAX_ENTRIES`` distinct entries, so its memory is bounded. It counts the rest in ``overflow``.
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
        file: Path of the source file, as the code object has it.
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
    """One thing that was asked for at one site.

    Attributes:
        site: Where.
        requested: What the program asked for, as it wrote it: ``"cuda:0"``, ``"torch.autocast(float16)"``.
        done: What was done instead: ``"cpu"``, ``"bfloat16"``.
        fidelity: How close that is.
        count: How often.
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
        # Keyed by the identity of the code: a code object's own hash reads all of it. ``_codes`` keeps them alive.
        self._entries: dict[tuple[int, int, str, str], Entry] = {}
        self._codes: dict[int, CodeType] = {}

    def record(
        self, requested: str, done: str, fidelity: Fidelity, frame: FrameType | None = None, *, above: int = 0
    ) -> bool:
        """Count one event at the program's current line.

        Args:
            requested: As :class:`Entry` has it.
            done: As :class:`Entry` has it.
            fidelity: As :class:`Entry` has it.
            frame: The program's frame; None to look for it.
            above: How many callers are known to be this package's.

        Returns:
            True when this is the first such event at this line.
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
        """All entries, the most frequent first."""
        return sorted(self._entries.values(), key=lambda entry: -entry.count)

    @property
    def degraded(self) -> list[Entry]:
        """The entries that are not exact, the most frequent first."""
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
    """Return the innermost frame that is neither torch's nor this package's; the outermost frame if all are.

    Args:
        above: How many callers need not be looked at.
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
