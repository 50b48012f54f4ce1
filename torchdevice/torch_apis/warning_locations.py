"""Warnings that torch gives at the line that called it, which in a scope is often a line of this package.

Python takes the line from the stack, by number: torch's C++ from the innermost frame of Python, torch's Python mostly
from its caller. Where that frame is this package's, or that of torch's function which asks a mode, the warning is given
again at the program's line, so that filters and the rule "once per line" see the program.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch.overrides

from torchdevice.core import Context, replaces
from torchdevice.foundation.tracebacks import PACKAGE
from torchdevice.journal.callers import caller_frame, warn_at


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE) or file == torch.overrides.__file__


@replaces(warnings, "_showwarnmsg")
def _show(context: Context, original: Any, message: Any) -> None:
    """``warnings._showwarnmsg``, through which every warning passes that the filters let through."""
    if _is_ours(message.filename):
        # Python forgets that it gave the warning, so that it gives it at other lines of the program too.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == message.filename:
                frame.f_globals.pop("__warningregistry__", None)
            frame = frame.f_back
        getattr(warnings, "onceregistry", {}).pop((str(message.message), message.category), None)
        warn_at(caller_frame(), message.message, message.category, message.source)
    else:
        original(message)
