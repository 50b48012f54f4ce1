"""Tracebacks without this package's frames, so that torch's errors end at the program's line.

A call that succeeds pays nothing: an error is looked at where it leaves a scope, and where nobody
catches it while ``enable`` is in force. ``TORCHDEVICE_TRACEBACKS=full`` keeps all frames.

A rank leaves its traceback to the command that started it (``rank_notes.py``). Where another
launcher started the ranks, of those that fail alike one shows its traceback, and each other one the
line where it failed.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import multiprocessing
import os
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Callable
from itertools import zip_longest
from types import TracebackType
from typing import Any, NoReturn

from torchdevice.kernel.python import printable, rank_notes, run_folder
from torchdevice.kernel.python.library_files import PACKAGE, is_library

FRAMES = "TORCHDEVICE_TRACEBACKS"
_ASKING = os.path.join("torch", "overrides.py")
_OPERATORS = os.path.join("torch", "_ops.py")

_FAR = 10
"""How many lines of libraries may follow the program's before it is shown again."""

_OF_ANOTHER_RANK = re.compile(r" cannot end: rank \d+ failed at ")
"""A collective's error because another rank failed, which shows the cause itself."""

_OF_DEFECTS = (AttributeError, NameError, LookupError, AssertionError)
"""Errors that torch's operators do not raise. Where one comes from this package itself, its frames
are wanted.
"""

_REMEDIES = {
    "triton": (
        "Install Triton by `pip install triton` (Linux). Its kernels then run without a GPU, in "
        "NumPy."
    ),
    r"(cupy|cupyx|cupy_backends)(\..*)?": (
        "CuPy runs CUDA's own code. Use torch or NumPy where there is no GPU."
    ),
    r"numba\.cuda\.(api|cudadrv|dispatcher)(\..*)?": (
        "Set NUMBA_ENABLE_CUDASIM=1 before numba is imported."
    ),
}
"""Modules that are missing, or in whose code an error was raised -> a note on the error."""

_MISSING: dict[str, str] = {}
"""Modules that are missing -> a note on the error, registered by :func:`note_missing`."""


_RAISED: dict[str, str] = {}
"""Modules in whose code an error was raised -> a note on it, registered by :func:`note_raised`."""

_LACKING: dict[str, str] = {}
"""Files of modules -> a note on the error that one lacks a name which is imported from it."""


def note_lacking(file: str, note: str) -> None:
    """Register a note on ImportError for a name that a module of a file lacks."""
    _LACKING[file] = note


def note_missing(pattern: str, note: str) -> None:
    """Register a note on ModuleNotFoundError for modules that match a regular expression."""
    _MISSING[pattern] = note


def note_raised(pattern: str, note: str) -> None:
    """Register a note on errors raised in the code of modules that match a regular expression."""
    _RAISED[pattern] = note


def trim(error: BaseException | None) -> None:
    """Take this package's frames out of the traceback of an error and of its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kept = without_ours(error)
        if kept is not None:
            error.__traceback__ = kept
        error = error.__cause__ or error.__context__


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error. On Python 3.10 it is stored as later versions do; pytest shows it."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]


def show_notes(error: BaseException) -> None:
    """Print an error's notes after Python 3.10 printed its traceback without them."""
    if sys.version_info < (3, 11):
        for note in getattr(error, "__notes__", ()):
            print(printable.lines(note), file=sys.stderr)


def without_ours(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without this package's frames; None where there are no others."""
    entries = _entries(error.__traceback__)
    _add_remedies(error, entries)
    if os.environ.get(FRAMES) == "full":
        return error.__traceback__
    _drop_handled_here(error)
    is_defect = isinstance(error, _OF_DEFECTS) and not isinstance(error, IndexError)
    if is_defect and entries and _is_ours(entries[-1]):
        return error.__traceback__
    kept = _of_others(entries)
    for entry, following in zip_longest(kept, kept[1:]):
        entry.tb_next = following
    return kept[0] if kept else None


def _add_remedies(error: BaseException, entries: list[TracebackType]) -> None:
    """Add the notes about a module that is missing, or in which the error was raised."""
    # A set, because the frames of a long traceback are of few modules.
    names = {str(entry.tb_frame.f_globals.get("__name__")) for entry in entries}
    remedies = {**_REMEDIES, **_RAISED}
    if isinstance(error, ModuleNotFoundError):
        names, remedies = {str(error.name)}, {**_REMEDIES, **_MISSING}
    found = [
        remedy
        for pattern, remedy in remedies.items()
        if any(re.fullmatch(pattern, name) for name in names)
    ]
    if isinstance(error, ImportError) and error.path in _LACKING:
        found.append(_LACKING[error.path])
    for remedy in found:
        if remedy not in getattr(error, "__notes__", ()):
            add_note(error, remedy)


def note_program_line(error: BaseException) -> None:
    """Show the program's line again under an error of this package's that libraries led to.

    Call this while the traceback has all its frames.
    """
    entries = _entries(error.__traceback__)
    if not entries or not _is_ours(entries[-1]):
        return
    shown = _of_others(entries)
    programs = [index for index, entry in enumerate(shown) if not is_library(_file(entry))]
    if programs and len(shown) - programs[-1] > _FAR:
        entry = shown[programs[-1]]
        place = f"{os.path.basename(_file(entry))}:{entry.tb_lineno}"
        text = linecache.getline(_file(entry), entry.tb_lineno).strip()
        add_note(error, f"The program's line is {place}: {text}")


def _drop_handled_here(error: BaseException) -> None:
    """Remove an error that only this package raised and handled from another's context."""
    handled = error.__context__
    if handled is None or handled is error.__cause__:
        return
    frames = _entries(handled.__traceback__)
    if frames and all(map(_is_ours, frames)):
        error.__context__ = handled.__context__


def _of_others(entries: list[TracebackType]) -> list[TracebackType]:
    """Return the entries of a traceback that are not this package's.

    Where torch's Python asked a mode, it called itself again: of the two frames of one function the
    second is kept. Frames of an operator's object go where the program did not call one itself.
    """
    kept: list[TracebackType] = []
    crossed = False
    for entry, following in zip_longest(entries, entries[1:]):
        if _is_ours(entry) or (
            following and _is_ours(following) and _file(entry) == contextlib.__file__
        ):
            crossed = True
            if kept and _file(kept[-1]).endswith(_ASKING):
                kept.pop()
            continue
        if crossed and kept:
            if _is_called_here(entry, kept[-1]):
                continue
            if kept[-1].tb_frame.f_code is entry.tb_frame.f_code:
                kept.pop()
        crossed = False
        kept.append(entry)
    return kept


def _is_called_here(entry: TracebackType, before: TracebackType) -> bool:
    """Return whether this package called an operator's object, and not the frame before."""
    return _file(entry).endswith(_OPERATORS) and not _file(before).endswith(_OPERATORS)


def _entries(entry: TracebackType | None) -> list[TracebackType]:
    found = []
    while entry is not None:
        found.append(entry)
        entry = entry.tb_next
    return found


def _is_ours(entry: TracebackType) -> bool:
    return _file(entry).startswith(PACKAGE)


def _file(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def last_place(error: BaseException) -> str:
    """Return the program's last line in a traceback, and its file's name; nothing if none."""
    frames = _entries(without_ours(error))
    frames = [each for each in frames if not is_library(_file(each))] or frames
    return f"{os.path.basename(_file(frames[-1]))}:{frames[-1].tb_lineno}" if frames else ""


def ipython() -> Any:
    """Return IPython's session, an ``InteractiveShell``; None in other programs."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


_HOOKS = ((sys, "excepthook"), (threading, "excepthook"), (sys, "unraisablehook"), (sys, "exit"))


class Hooks:
    """The hooks that show errors of main and other threads, destructors and notebook cells.

    Args:
        of_main: Whether errors of the main thread are shown, too. Under ``torchdevice run`` the
            command shows them.

    Attributes:
        exit_said: Where the program of a rank called ``sys.exit``, and with what; empty where it
            did not.
    """

    def __init__(self, of_main: bool = True):
        self._before = tuple(getattr(module, name) for module, name in _HOOKS)
        self.exit_said = ""
        exits: Callable[..., NoReturn] = self._exit if "RANK" in os.environ else sys.exit
        self._own = (
            self._show if of_main else sys.excepthook,
            self._show_of_thread,
            self._show_ignored,
            exits,
        )
        self._witness = rank_notes.Witness()
        self._shell = ipython()
        self._types = (Exception, KeyboardInterrupt)

    @functools.wraps(sys.exit)
    def _exit(self, status: Any = None, /) -> NoReturn:
        code, caller = status or 0, sys._getframe(1)
        place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        self.exit_said = f" at {place} with exit code {code if isinstance(code, int) else 1}"
        rank_notes.leave_failure(place, f"exit code {code if isinstance(code, int) else 1}")
        raise SystemExit(status)

    def begin(self) -> None:
        """Show errors from now on."""
        for (module, name), own in zip(_HOOKS, self._own, strict=True):
            setattr(module, name, own)
        self._witness.begin()
        # A program that shows the errors of its cells itself goes on doing so.
        if self._shell is not None and not self._shell.custom_exceptions:
            self._shell.set_custom_exc(self._types, _show_in_cell)

    def end(self) -> None:
        """Restore the hooks that the program has not replaced. May be called again."""
        for (module, name), own, before in zip(_HOOKS, self._own, self._before, strict=True):
            if getattr(module, name) is own:
                setattr(module, name, before)
        self._witness.end()
        if self._shell is not None and self._shell.custom_exceptions is self._types:
            self._shell.set_custom_exc((), None)

    def _show(
        self, kind: type[BaseException], value: BaseException, frames: TracebackType | None
    ) -> None:
        rank = os.environ.get("RANK")
        if rank is None:
            note_program_line(value)
        trim(value)
        frames = value.__traceback__ or frames
        said = "".join(traceback.format_exception_only(kind, value)).rstrip()
        text = "".join(traceback.format_exception(value))
        if rank_notes.leave_failure(
            last_place(value), said, text, interrupted=kind is KeyboardInterrupt
        ):
            return
        # The text of the error is not part of the place: it may name the rank's own device.
        places = [(each.filename, each.lineno) for each in traceback.extract_tb(frames)]
        shown, alike = (
            _another_rank_shows(kind.__qualname__, places, *text) for text in ((), (said,))
        )
        if shown or (rank is not None and _OF_ANOTHER_RANK.search(said)):
            text = ", as another rank did." if shown and alike else f": {said}"
            print(
                printable.lines(f"rank {rank} failed at {last_place(value)}{text}"), file=sys.stderr
            )
        else:
            self._before[0](kind, value, frames)
            show_notes(value)

    def _show_of_thread(self, args: threading.ExceptHookArgs) -> None:
        trim(args.exc_value)
        self._before[1](args)

    def _show_ignored(self, args: Any) -> None:
        kind, value, _, *rest = args
        trim(value)
        # A handler of a signal that C calls has no other frames.
        frames = None if value is None else without_ours(value)  # an error may be falsy
        self._before[2](type(args)((kind, value, frames, *rest)))


def _show_in_cell(
    shell: Any, kind: type[BaseException], value: BaseException, frames: Any, tb_offset: Any = None
) -> None:
    trim(value)
    if "device-side assert" in str(value):
        add_note(
            value,
            "The device is lost, as on a GPU. Run `%torchdevice` again, and create your tensors "
            "again.",
        )
    shell.showtraceback((kind, value, value.__traceback__), tb_offset=tb_offset)


def _another_rank_shows(*what: Any) -> bool:
    return "RANK" in os.environ and not run_folder.claim(f"{zlib.crc32(repr(what).encode()):08x}")


def told_failure() -> str:
    """Return at which line an error ended this process, and the error; nothing where none did.

    A process of multiprocessing asks this while the error passes.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None and multiprocessing.parent_process() is not None:
        error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return f"ended with exit status {error.code}" if error.code else ""
    if error is None:
        return ""
    said = f"{type(error).__name__}: {error}".removesuffix(": ")  # an error may have no text
    return f"failed at {last_place(error)} with {said}"
