"""Handlers of signals, which wait while torch asks the device guard.

torch lets Python run handlers between the moment when it looks a method of the guard up and the moment when it calls
it, and ends the process if a handler raises there, as Ctrl-C's does. So while the main thread, in which Python runs
handlers, is in a scope on a simulated device, each handler stands behind one that lets the signal come again later if
torch is asking. What a program reads and sets by ``signal.signal`` and ``signal.getsignal`` are its own handlers.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchdevice.core.patching import Replaced, put_in, take_out
from torchdevice.simulation.device_guard import is_asked

_interrupt: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]

_NUMBERS = [int(number) for number in signal.valid_signals()]


class _Waiting:
    """A handler of the program, which waits while torch asks the guard."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if not is_asked():
            return self.handler(number, frame)
        # Python would run the handler again after a call in this function. Unpacking is none.
        (_,) = map(_interrupt, (number,))


def _own(handler: Any) -> Any:
    """Return the program's handler."""
    return handler.handler if type(handler) is _Waiting else handler


def _set(original: Any) -> Any:
    @functools.wraps(original)
    def set_handler(signalnum: Any, handler: Any) -> Any:
        return _own(original(signalnum, _Waiting(handler) if callable(handler) else handler))

    return set_handler


def _get(original: Any) -> Any:
    @functools.wraps(original)
    def get_handler(signalnum: Any) -> Any:
        return _own(original(signalnum))

    return get_handler


_patches = Replaced(signal, "signal", _set), Replaced(signal, "getsignal", _get)


def settle(in_a_scope: bool) -> None:
    """Let the handlers wait if the main thread is in a scope on a simulated device, else no more.

    Does nothing in other threads. May be called again after an interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if in_a_scope:
        put_in(_patches)
    else:
        take_out(_patches)
    for number in _NUMBERS:
        handler = _signal.getsignal(number)
        if (type(handler) is _Waiting) is not in_a_scope and callable(handler):
            _signal.signal(number, _Waiting(handler) if in_a_scope else _own(handler))
