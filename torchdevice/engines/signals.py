"""Handlers of signals, which run where the program is, and not inside this package.

Python runs a handler between any two steps of Python code. In the middle of a torch call that this package handles, a
handler would see no mode, no autograd and an allocator that is being changed. On a machine with CUDA the call is C
code, in which no handler runs. So while the main thread, in which Python runs handlers, is in a scope, each handler
stands behind one that lets the signal come again until the call has ended.

torch also lets Python run handlers between the moment when it looks a method of the device guard up and the moment when
it calls it, and ends the process if a handler raises there, as Ctrl-C's does. Handlers wait there too.

A program reads and sets its own handlers by ``signal.signal`` and ``signal.getsignal``.
"""

from __future__ import annotations

# The C module, whose functions stay the original while `signal.signal` is patched.
import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from torchdevice.core import Replaced
from torchdevice.core.patching import in_every_thread, put_in, take_out
from torchdevice.engines import destructors
from torchdevice.engines.mode import as_program, with_mode
from torchdevice.foundation.tracebacks import PACKAGE
from torchdevice.journal.callers import PROGRAM, kind_of

# It takes the number of a signal since Python 3.10.
_interrupt: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]

_NUMBERS = [int(number) for number in signal.valid_signals()]

_HANDLING = tuple(os.path.join(PACKAGE, folder, "") for folder in ("engines", "simulation"))
"""The folders of the code that handles calls and runs operators."""

_OFF_THE_STACK = torch.overrides.handle_torch_function.__code__
"""Takes the mode off torch's stack for a call, and would lose it if a handler raised on the way."""


is_asked: Callable[[], bool] = bool
"""Whether torch asks the device guard, see ``simulation/device_guard.py``, which sets it."""


def _is_handled(frame: FrameType | None) -> bool:
    """Return whether a frame is inside a torch call that this package handles, and runs no code of the program."""
    # `with_mode` marks where this package calls code of the program again, so the search ends there.
    while frame is not None and frame.f_code is not with_mode.__code__:
        if frame.f_code is _OFF_THE_STACK or frame.f_code.co_filename.startswith(_HANDLING):
            return True
        if kind_of(frame) == PROGRAM:
            return False
        frame = frame.f_back
    return False


class _Waiting:
    """A handler of the program, which waits while this package is at work or torch asks the guard."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if not (is_asked() or _is_handled(frame)):
            return as_program(self.handler, number, frame)
        # Python would run the handler again after a call in this function. Unpacking is none.
        (_,) = map(_interrupt, (number,))


def _own(handler: Any) -> Any:
    """Return the program's handler."""
    # `type`, not `isinstance`: a subclass is of the program.
    return handler.handler if type(handler) is _Waiting else handler


def _set(original: Any, signalnum: Any, handler: Any) -> Any:
    # SIG_DFL and SIG_IGN are integers, which Python handles in C.
    return _own(original(signalnum, _Waiting(handler) if callable(handler) else handler))


def _get(original: Any, signalnum: Any) -> Any:
    return _own(original(signalnum))


_patches = Replaced(signal, "signal", in_every_thread(_set)), Replaced(signal, "getsignal", in_every_thread(_get))


def settle(in_a_scope: bool) -> None:
    """Let the handlers wait if the main thread is in a scope, else no more, and lend collections the mode meanwhile.

    Does nothing in other threads. May be called again after an interrupt.
    """
    # Python runs handlers in the main thread only, and refuses `signal.signal` elsewhere.
    if in_a_scope is _patches[0].expected or threading.current_thread() is not threading.main_thread():
        return
    if in_a_scope:
        # First, so that a handler set from here on is wrapped.
        put_in(_patches)
    else:
        destructors.remove()
    # The C function, since the patched one would hide `_Waiting`.
    for number, handler in zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True):
        # Most are the system's own, 0. None is a handler that Python has not installed, which must not be touched.
        if handler and (type(handler) is _Waiting) is not in_a_scope and callable(handler):
            _signal.signal(number, _Waiting(handler) if in_a_scope else _own(handler))
    if in_a_scope:
        destructors.install()
    else:
        take_out(_patches)  # last: until then the next exit looks at the handlers again
