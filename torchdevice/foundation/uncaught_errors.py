"""How an error that nobody catches is shown while ``enable`` is in force: without this package's frames.

Ranks that fail alike show one traceback, and a line each for the others.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import zlib
from types import TracebackType
from typing import Any

from torchdevice.foundation import run_folder
from torchdevice.foundation.tracebacks import trim


class Hooks:
    """The hooks that show errors of the main thread, of other threads and, in a notebook, of cells.

    Args:
        shell: IPython's ``InteractiveShell``; None in other programs.
        of_main: Whether errors of the main thread are shown, too. Under ``torchdevice run`` the command shows them.
    """

    def __init__(self, shell: Any = None, of_main: bool = True):
        self._before = sys.excepthook, threading.excepthook
        self._own = self._show if of_main else sys.excepthook, self._show_of_thread
        self._shell = shell
        self._types = (Exception,)

    def begin(self) -> None:
        """Show errors from now on."""
        sys.excepthook, threading.excepthook = self._own
        # A program that shows the errors of its cells itself goes on doing so.
        if self._shell is not None and not self._shell.custom_exceptions:
            self._shell.set_custom_exc(self._types, _show_in_cell)

    def end(self) -> None:
        """Put the hooks back, but not those in whose place the program has put others. May be called again."""
        if sys.excepthook is self._own[0]:
            sys.excepthook = self._before[0]
        if threading.excepthook is self._own[1]:
            threading.excepthook = self._before[1]
        if self._shell is not None and self._shell.custom_exceptions is self._types:
            self._shell.set_custom_exc((), None)

    def _show(self, kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
        trim(value)
        frames = value.__traceback__ or frames
        if _is_shown_by_another_rank(kind, frames):
            said = "".join(traceback.format_exception_only(kind, value))
            print(f"rank {os.environ['RANK']}: the same error{_line(frames)}: {said}", end="", file=sys.stderr)
        else:
            self._before[0](kind, value, frames)

    def _show_of_thread(self, args: threading.ExceptHookArgs) -> None:
        trim(args.exc_value)
        self._before[1](args)


def _show_in_cell(
    shell: Any, kind: type[BaseException], value: BaseException, frames: Any, tb_offset: Any = None
) -> None:
    trim(value)
    shell.showtraceback((kind, value, value.__traceback__), tb_offset=tb_offset)


def _is_shown_by_another_rank(kind: type[BaseException], frames: TracebackType | None) -> bool:
    if "RANK" not in os.environ:
        return False
    # The text of the error is not compared: it names the rank's own device.
    places = [(each.filename, each.lineno) for each in traceback.extract_tb(frames)]
    return not run_folder.claim(f"{zlib.crc32(repr((kind.__qualname__, places)).encode()):08x}")


def _line(frames: TracebackType | None) -> str:
    last = traceback.extract_tb(frames)[-1:]
    return f" at {os.path.basename(last[0].filename)}:{last[0].lineno}" if last else ""
