"""Tracebacks without the frames of this package, so that an error of torch's ends at the program's line.

A call that succeeds pays nothing: an error is looked at where it leaves a scope, and where nobody catches it.
``TORCHDEVICE_TRACEBACKS=full`` keeps all frames.
"""

from __future__ import annotations

import contextlib
import os
import re
from itertools import zip_longest
from types import TracebackType

PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
"""The folder of this package, whose frames are not the program's."""
FRAMES = "TORCHDEVICE_TRACEBACKS"
_ASKING = os.path.join("torch", "overrides.py")

_OF_DEFECTS = (AttributeError, NameError, LookupError, AssertionError)
"""Errors that torch's operators do not raise. Where one comes from this package itself, its frames are wanted."""

_REMEDIES = {
    "triton": "Install Triton by `pip install triton` (Linux). Its kernels then run without a GPU, in NumPy.",
    r"(cupy|cupyx|cupy_backends)(\..*)?": "CuPy runs CUDA's own code. Use torch or NumPy where there is no GPU.",
    r"numba\.cuda\.(api|cudadrv|dispatcher)(\..*)?": "Set NUMBA_ENABLE_CUDASIM=1 before numba is imported.",
}
"""Modules that are missing, or in whose code an error was raised -> a note on the error."""


def trim(error: BaseException | None) -> None:
    """Take this package's frames out of the traceback of an error, and of those that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kept = without_ours(error)
        if kept is not None:
            error.__traceback__ = kept
        error = error.__cause__ or error.__context__


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error; Python 3.10 has none."""
    if hasattr(error, "add_note"):
        error.add_note(note)


def without_ours(error: BaseException) -> TracebackType | None:
    """Return an error's traceback without this package's frames; None where there are no others.

    The entries that are kept are linked anew, in place. Where torch's Python asked a mode, it called itself again: of
    the two frames of one function the second is kept.
    """
    entries = _entries(error.__traceback__)
    raised_in = [str(entry.tb_frame.f_globals.get("__name__")) for entry in entries]
    names = [str(error.name)] if isinstance(error, ModuleNotFoundError) else raised_in
    for pattern, remedy in _REMEDIES.items():
        if any(re.fullmatch(pattern, name) for name in names) and remedy not in getattr(error, "__notes__", ()):
            add_note(error, remedy)
    if os.environ.get(FRAMES) == "full":
        return error.__traceback__
    handled = error.__context__
    if handled is not None and handled is not error.__cause__:
        frames = _entries(handled.__traceback__)
        if frames and all(map(_is_ours, frames)):  # raised and handled in this package: it is not the program's
            error.__context__ = handled.__context__
    if entries and _is_ours(entries[-1]) and isinstance(error, _OF_DEFECTS) and not isinstance(error, IndexError):
        return error.__traceback__
    kept: list[TracebackType] = []
    crossed = False
    for entry, following in zip_longest(entries, entries[1:]):
        if _is_ours(entry) or (following and _is_ours(following) and _file(entry) == contextlib.__file__):
            crossed = True
            if kept and _file(kept[-1]).endswith(_ASKING):
                kept.pop()
            continue
        if crossed and kept and kept[-1].tb_frame.f_code is entry.tb_frame.f_code:
            kept.pop()
        crossed = False
        kept.append(entry)
    for entry, following in zip_longest(kept, kept[1:]):
        entry.tb_next = following
    return kept[0] if kept else None


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
    """Return the program's last line in an error's traceback, with the file's name; nothing where there is none."""
    frames = _entries(without_ours(error))
    frames = [each for each in frames if "site-packages" not in _file(each)] or frames
    return f"{os.path.basename(_file(frames[-1]))}:{frames[-1].tb_lineno}" if frames else ""
