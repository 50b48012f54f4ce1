"""A note on errors of programs that give up because a device's type is not CUDA's.

On a real target a tensor reports the target's own device, so such a comparison is false. The error
has the program's own words, and nothing in it points to the cause.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
from types import TracebackType
from typing import TYPE_CHECKING

from torchdevice.kernel.python.library_files import is_library
from torchdevice.kernel.python.uncaught_errors import add_note

if TYPE_CHECKING:
    from torchdevice.check import Finding
    from torchdevice.scope.scope import Scope

_RULES = ("device-type", "is-cuda")

_DRAWN_ON_CPU = re.compile(r"Expected a 'cpu' device type for generator but found '")
"""torch's error where a program's generator meets a library that draws on the CPU on a Mac.

diffusers' DDPMPipeline is one.
"""

_FAR = 40
"""How many lines above the failing one a comparison may stand to be taken for the cause."""


def add_to(error: BaseException, frames: TracebackType | None, scope: Scope | None) -> None:
    """Note on an error of the program's own code which comparison with a device's type led to it.

    Python shows no notes where a program ends itself with a text, which then gets the note.

    Args:
        error: The error, which nobody has caught.
        frames: Its traceback without this package's frames.
        scope: The scope of the program.
    """
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        note = _note(error, frames, scope)
        error.code = f"{error.code}\n{note}" if note else error.code
    elif isinstance(error, Exception):
        note = _note(error, frames, scope)
        if note:
            add_note(error, note)


def _note(error: BaseException, frames: TracebackType | None, scope: Scope | None) -> str:
    """Return a note on the comparison that led to the program's end; empty if none is known."""
    if scope is None or frames is None:
        return ""
    context = scope._resolved()
    if context.options.identity == "program" or context.names.is_native:
        return ""
    shown = context.shown_as or context.device_type
    if context.runtime.shares_host_memory:
        remedy = "--target simulated:cuda"
    else:
        remedy = "--identity program"
    remedy = (
        f"`torchdevice run {remedy}` lets tensors report the device that the program asked for."
    )
    if _DRAWN_ON_CPU.match(str(error)):
        return (
            f"Some libraries draw numbers on the CPU where a device's type is {shown!r}, and the "
            f"generator is of {shown!r}.\n{remedy}"
        )
    comparison = _cause(frames, context.names.family)
    if comparison is None:
        return ""
    return (
        f"{os.path.basename(comparison.path)}:{comparison.line} compares a device's type, which is "
        f"{shown!r} here: {comparison.text.strip()}\n{remedy}"
    )


def _cause(frames: TracebackType, target: str) -> Finding | None:
    """Return the comparison that led to an error in the program's words; None for another error."""
    entries = [frames]
    while entries[-1].tb_next is not None:
        entries.append(entries[-1].tb_next)
    last = entries[-1].tb_frame.f_code.co_filename
    said = linecache.getline(last, entries[-1].tb_lineno)
    if is_library(last) or not re.search(r"\b(raise|assert|exit)\b", said):
        return None
    return next(filter(None, (_comparison(entry, target) for entry in reversed(entries))), None)


def _comparison(entry: TracebackType, target: str) -> Finding | None:
    """Return a frame's last comparison at its line or shortly before."""
    code, line = entry.tb_frame.f_code, entry.tb_lineno
    if is_library(code.co_filename) or not os.path.isfile(code.co_filename):
        return None
    from torchdevice.check import Target, checker

    begin = max(code.co_firstlineno, line - _FAR)
    with contextlib.suppress(OSError):
        found = checker.check_file(code.co_filename, Target.named(target), _RULES)
        near = [
            finding for finding in found if finding.rule in _RULES and begin <= finding.line <= line
        ]
        return near[-1] if near else None
    return None
