"""Errors and warnings that Python reports at lines of the program, without this package's frames.

An error may become a text in a logger or in a worker process: workers of data loaders and processes
of ``torch.multiprocessing`` send such a text to the process that waits for them.

A warning names a line, which Python takes from the stack, by number: torch's C++ from the innermost
frame of Python, torch's Python mostly from its caller. Where that frame is this package's, or that
of torch's function which asks a mode, the warning is given again at the program's line, so that
filters and the rule "once per line" see the program.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from types import FrameType
from typing import Any

import torch.overrides

from torchdevice.calls import error_texts
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.journal.callers import caller_frame, warn_at
from torchdevice.kernel.python.library_files import PACKAGE
from torchdevice.kernel.python.uncaught_errors import trim


@replaces(traceback.TracebackException, "__init__")
def _read(
    context: Context,
    original: Any,
    self: Any,
    exc_type: Any,
    exc_value: Any,
    exc_traceback: Any,
    **options: Any,
) -> None:
    """``TracebackException.__init__``, with which Python reads an error, without our frames."""
    own = getattr(exc_value, "__traceback__", None)
    if exc_value is not None:
        error_texts.name_types(context, exc_value)
    trim(exc_value)
    frames = exc_value.__traceback__ if own is not None and exc_traceback is own else exc_traceback
    original(self, exc_type, exc_value, frames, **options)


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE) or file == torch.overrides.__file__


@replaces(warnings, "_showwarnmsg")
def _show(context: Context, original: Any, message: Any) -> None:
    """``warnings._showwarnmsg``, which every warning passes that filters let through."""
    if _is_ours(message.filename):
        # Python forgets that it gave the warning, and so repeats it at the program's other lines.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == message.filename:
                frame.f_globals.pop("__warningregistry__", None)
            frame = frame.f_back
        getattr(warnings, "onceregistry", {}).pop((str(message.message), message.category), None)
        warn_at(caller_frame(), message.message, message.category, message.source)
    else:
        original(message)
