"""How an error that nobody catches is shown while ``enable`` is in force: without this package's frames.

Each rank says in a line where it failed. Of the ranks that fail alike one leaves its traceback to the command that
started them, which shows it below these lines.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from torchdevice.foundation import run_folder
from torchdevice.foundation.environment import COLLECTED
from torchdevice.foundation.tracebacks import last_place, trim, without_ours


def ipython() -> Any:
    """Return IPython's session, an ``InteractiveShell``; None in other programs."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


_HOOKS: tuple[tuple[Any, str], ...] = (
    (sys, "excepthook"),
    (threading, "excepthook"),
    (sys, "unraisablehook"),
    (sys, "exit"),
)


class Hooks:
    """The hooks that show errors of the main thread, of other threads, of destructors and, in a notebook, of cells.

    Args:
        of_main: Whether errors of the main thread are shown, too. Under ``torchdevice run`` the command shows them.

    Attributes:
        exit_said: Where the program of a rank called ``sys.exit``, and with what; empty where it did not.
    """

    def __init__(self, of_main: bool = True):
        self._before = tuple(getattr(module, name) for module, name in _HOOKS)
        self.exit_said = ""
        exits: Callable[..., NoReturn] = self._exit if "RANK" in os.environ else sys.exit
        self._own = (self._show if of_main else sys.excepthook, self._show_of_thread, self._show_ignored, exits)
        self._shell = ipython()
        self._types = (Exception,)

    @functools.wraps(sys.exit)
    def _exit(self, status: Any = None, /) -> NoReturn:
        code, caller = status or 0, sys._getframe(1)
        place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        self.exit_said = f" at {place} with exit code {code if isinstance(code, int) else 1}"
        raise SystemExit(status)

    def begin(self) -> None:
        """Show errors from now on."""
        for (module, name), own in zip(_HOOKS, self._own, strict=True):
            setattr(module, name, own)
        # A program that shows the errors of its cells itself goes on doing so.
        if self._shell is not None and not self._shell.custom_exceptions:
            self._shell.set_custom_exc(self._types, _show_in_cell)

    def end(self) -> None:
        """Put the hooks back, but not those in whose place the program has put others. May be called again."""
        for (module, name), own, before in zip(_HOOKS, self._own, self._before, strict=True):
            if getattr(module, name) is own:
                setattr(module, name, before)
        if self._shell is not None and self._shell.custom_exceptions is self._types:
            self._shell.set_custom_exc((), None)

    def _show(self, kind: type[BaseException], value: BaseException, frames: TracebackType | None) -> None:
        trim(value)
        frames = value.__traceback__ or frames
        said = "".join(traceback.format_exception_only(kind, value)).rstrip()
        # The text of the error is not part of the place: it may name the rank's own device.
        places = [(each.filename, each.lineno) for each in traceback.extract_tb(frames)]
        shown, alike = (_another_rank_shows(kind.__qualname__, places, *text) for text in ((), (said,)))
        rank = os.environ.get("RANK")
        left = shown or (COLLECTED in os.environ and run_folder.leave(".failed", _of_rank(rank, value)))
        if left:
            text = ", as another rank did." if alike else f": {said}"
            print(f"rank {rank} failed at {last_place(value)}{text}", file=sys.stderr)
        else:
            self._before[0](kind, value, frames)

    def _show_of_thread(self, args: threading.ExceptHookArgs) -> None:
        trim(args.exc_value)
        self._before[1](args)

    def _show_ignored(self, args: Any) -> None:
        kind, value, _, *rest = args
        trim(value)
        # A handler of a signal that C calls has no other frames.
        self._before[2](type(args)((kind, value, value and without_ours(value), *rest)))


def _show_in_cell(
    shell: Any, kind: type[BaseException], value: BaseException, frames: Any, tb_offset: Any = None
) -> None:
    trim(value)
    shell.showtraceback((kind, value, value.__traceback__), tb_offset=tb_offset)


def _of_rank(rank: str | None, error: BaseException) -> str:
    return f"torchdevice: the traceback of rank {rank}:\n{''.join(traceback.format_exception(error))}"


def _another_rank_shows(*what: Any) -> bool:
    return "RANK" in os.environ and not run_folder.claim(f"{zlib.crc32(repr(what).encode()):08x}")


def told_failure() -> str:
    """Return at which line an error ended this process, and the error; nothing where none did."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"failed at {last_place(error)} with {type(error).__name__}: {error}"
