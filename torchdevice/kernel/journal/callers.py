"""The program's line that makes a call: outside this package, installed packages and Python's.

A call has two places. The *caller* is the innermost frame that is neither torch's nor this
package's: where somebody asked for a device. Often that is a library, and then the *program* is the
innermost frame outside all libraries.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from torchdevice.kernel.python.library_files import PACKAGE

_MAX_KNOWN = 10_000

OURS, PROGRAM, LIBRARY = range(3)
"""Owner of a frame: torch or torchdevice, the user's program, a library."""


@dataclass(frozen=True)
class Site:
    """A line of a program.

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


def site_of(frame: FrameType) -> Site:
    """Return the line at which a frame is."""
    code = frame.f_code
    # Python 3.11 and later.
    return Site(code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name))


# ---- the owner of a frame ------------------------------------------------------------------------

_OURS = (os.path.dirname(os.path.abspath(torch.__file__ or "")) + os.sep, PACKAGE)


def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    found = {*(sysconfig.get_path(name) for name in names), os.path.dirname(os.__file__)}
    if site.ENABLE_USER_SITE:
        found.add(site.getusersitepackages())
    return tuple(sorted(os.path.abspath(folder) + os.sep for folder in found if folder))


_LIBRARIES = _library_folders()

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")

_TYPED = re.compile(r"<(?:stdin|ipython-input|python-input)")
"""The names that interactive interpreters give the program's text."""

KINDS: dict[str, int] = {}
"""Name of a file -> the owner of its frames, for the files seen so far."""


def kind_of(frame: FrameType) -> int:
    """Return a frame's owner."""
    file = frame.f_code.co_filename
    kind = KINDS.get(file)
    if kind is not None:
        return kind
    if file.startswith("<") and not file.startswith("<frozen"):
        # Generated code is named alike wherever it is from. Code of `python -c` is in `__main__`.
        if frame.f_globals.get("__name__") == "__main__" or _TYPED.match(file):
            return PROGRAM
        return LIBRARY
    if len(KINDS) > _MAX_KNOWN:
        KINDS.clear()
    kind = KINDS[file] = kind_of_file(file)
    return kind


def kind_of_file(file: str) -> int:
    """Return the owner of a file's frames."""
    if file.startswith(_OURS):
        return OURS
    if file.startswith(("<", *_LIBRARIES)) or _INSTALLED.search(file):
        return LIBRARY
    return PROGRAM


def caller_frame(above: int = 0) -> FrameType:
    """Return the innermost frame outside torch and this package, or else the outermost frame.

    Args:
        above: The number of innermost callers to skip.
    """
    frame = sys._getframe(1 + above)
    while kind_of(frame) == OURS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def program_frame(frame: FrameType) -> tuple[FrameType | None, int]:
    """Return the program's innermost frame at or above one, and the number of callers above it.

    The first is None where there is none: in a thread of a library, and in an installed program run
    by ``-m``.
    """
    above = 0
    current: FrameType | None = frame
    while current is not None and kind_of(current) != PROGRAM:
        current, above = current.f_back, above + 1
    return current, above


def program_line() -> FrameType:
    """Return the program's innermost frame, or else the frame that called torch."""
    caller = caller_frame(1)
    return program_frame(caller)[0] or caller


def warn_at(
    frame: FrameType, message: Warning | str, category: type[Warning], source: Any = None
) -> None:
    """Give a warning as if the line at which a frame is had given it."""
    module = frame.f_globals.get("__name__")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(
        message, category, *place, module=module, registry=registry, source=source
    )
