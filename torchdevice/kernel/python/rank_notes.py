"""Notes of ranks for the launcher that ``torchdevice run`` runs, which shows them at the end.

A rank leaves how it failed, which other ranks it waits for, and where it was when a signal ended
it. All are files of the run's folder, so that they outlive the rank. The last is written by
``faulthandler``, which also writes it while the rank is in C.

The launcher of ``--ranks`` shows all of them. Any other, such as torchrun, shows them only where a
signal ended it: it may start ranks again that have failed, so these show their errors themselves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchdevice.kernel.python import run_folder
from torchdevice.kernel.python.environment import COLLECTED
from torchdevice.kernel.python.library_files import is_library

UNEXPLAINED = "a rank ended without an error, as one does that is killed"
"""The other ranks' errors, for a rank that a signal ended. The launcher knows the signal."""

ALL = "all"
SIGNALS = "signals"
"""Values of the variable: which ends of ranks the launcher shows."""

_FAILED = ".failed"
_WAITS = ".waits"
_STACK = ".stack"
_KINDS = (_FAILED, _WAITS, _STACK)

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
"""A line of faulthandler's. The innermost frame comes first."""


class Failure(NamedTuple):
    """How a rank failed.

    Attributes:
        rank: The rank, as a number in the whole program.
        time: When, in seconds since the epoch.
        place: The program's last line, with the file's name.
        error: The type and the text of the error.
        traceback: The traceback; empty where the program called ``sys.exit``.
        interrupted: Whether it was Ctrl-C.
    """

    rank: int
    time: float
    place: str
    error: str
    traceback: str = ""
    interrupted: bool = False


class Wait(NamedTuple):
    """A wait of a rank.

    Attributes:
        rank: The rank, as a number in the whole program.
        call: The collective, with shapes and the line of the program.
        since: When it began, in seconds since the epoch.
    """

    rank: int
    call: str
    since: float


def are_collected() -> bool:
    """Return whether this process is a rank whose launcher reads its notes."""
    if os.environ.get(COLLECTED) == SIGNALS and "TORCHELASTIC_RUN_ID" not in os.environ:
        return False  # the program has set RANK, and there is no launcher
    return COLLECTED in os.environ and "RANK" in os.environ


def leave_failure(
    place: str, error: str, traceback: str = "", *, interrupted: bool = False
) -> bool:
    """Replace this rank's note by one of how it failed. Return whether the launcher shows it."""
    failure = Failure(_rank(), time.time(), place, error, traceback, interrupted)
    if not are_collected() or not run_folder.leave(_FAILED, json.dumps(failure), _token(_FAILED)):
        return False
    return interrupted or os.environ[COLLECTED] == ALL


def leave_wait(call: str | None, since: float = 0.0) -> None:
    """Leave what this rank waits for; None where it waits no more."""
    if are_collected():
        run_folder.leave(_WAITS, json.dumps(call and Wait(_rank(), call, since)), _token(_WAITS))


class Witness:
    """Notes where a rank is when SIGTERM ends it, unless the program handles that signal."""

    def __init__(self) -> None:
        self._file: Any = None

    def begin(self) -> None:
        """Be ready from now on."""
        path = run_folder.path_of(_STACK, _token(_STACK)) if are_collected() else None
        if path is None or not hasattr(faulthandler, "register"):  # not on Windows
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        with contextlib.suppress(OSError):  # nothing can be written there
            self._file = path.open("w")
            faulthandler.register(signal.SIGTERM, self._file, all_threads=False, chain=True)

    def end(self) -> None:
        """Restore SIGTERM's handler. May be called again."""
        if self._file is None:
            return
        # The program has put no handler in this one's place.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            faulthandler.unregister(signal.SIGTERM)
        self._file.close()
        self._file = None


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _token(kind: str) -> str:
    """Return digits for a note of this rank: its attempt, rank and kind."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return f"{attempt % 0x100:02x}{_rank():05x}{_KINDS.index(kind)}"


# ---- what the launcher reads ---------------------------------------------------------------------


def failures() -> dict[int, Failure]:
    """Return how the ranks failed, by rank."""
    return {rank: Failure(*json.loads(path.read_text())) for rank, path in _files(_FAILED).items()}


def waits() -> dict[int, Wait]:
    """Return the last wait that each rank has noted, by rank."""
    found = {rank: json.loads(path.read_text()) for rank, path in _files(_WAITS).items()}
    return {rank: Wait(*fields) for rank, fields in found.items() if fields}


def stacks() -> dict[int, str]:
    """Return each rank's program line when a signal came: ``"train.py:12 in main"``."""
    return {
        rank: place
        for rank, path in _files(_STACK).items()
        for place in _program_line(path.read_text())
    }


def _files(kind: str) -> dict[int, Path]:
    """Return the notes of a kind, by rank: the last of each rank, of the launcher's last attempt.

    Every rank of an attempt leaves a file of stacks at its start, where the system has that.
    """
    folder = run_folder.path()
    attempts: dict[int, list[Path]] = {}
    for each in [] if folder is None else folder.glob("*-*"):
        if each.suffix in _KINDS:
            attempts.setdefault(int(_token_of(each)[:2], 16), []).append(each)
    if not attempts:
        return {}
    last = [each for each in attempts[max(attempts)] if each.suffix == kind]
    last.sort(key=lambda each: each.stat().st_mtime)
    found = {int(_token_of(each)[2:-1], 16): each for each in last}
    return dict(sorted(found.items()))


def _token_of(path: Path) -> str:
    return path.stem.partition("-")[2]


def _program_line(stack: str) -> Iterator[str]:
    """Yield the program's innermost line in a stack, or the innermost of all."""
    frames = _FRAME.findall(stack)
    for file, line, function in [each for each in frames if not is_library(each[0])][:1] or frames[
        :1
    ]:
        yield f"{os.path.basename(file)}:{line} in {function}"


def alike(said: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Yield each text with its ranks: ``("ranks 0, 2", text)``, ordered by first rank."""
    ranks: dict[str, list[str]] = {}
    for rank, text in sorted(said.items()):
        ranks.setdefault(text, []).append(str(rank))
    for text, named in ranks.items():
        yield f"{'ranks' if len(named) > 1 else 'rank'} {', '.join(named)}", text
