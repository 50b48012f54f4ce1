"""Code that Python runs at any time: signal handlers, and functions that a collection calls.

Python runs a handler between any two steps of Python code. In the middle of a torch call that this
package handles, a handler would see no mode, no autograd and an allocator that is being changed. On
a machine with CUDA the call is C code, in which no handler runs. So while the main thread, in which
Python runs handlers, is in a scope, each handler stands behind one that lets the signal come again
until the call has ended.

torch also lets Python run handlers between the moment when it looks a method of the device guard up
and the moment when it calls it, and ends the process if a handler raises there, as Ctrl-C's does.
Handlers wait there too.

A program reads and sets its own handlers by ``signal.signal`` and ``signal.getsignal``. Where
Python loses the error of a handler, in a destructor, the signal comes again.

Python also collects garbage at any time. Destructors, callbacks of weak references and
``gc.callbacks`` that use the device would reach torch itself while the mode handles a call and is
off. The mode is therefore lent for the time of the collection, and to the end of an object that a
tensor drops in a call. Python loses what is raised in these callbacks, so they are in place only
while handlers of signals wait for their end.
"""

from __future__ import annotations

# The C module, whose functions stay the original while `signal.signal` is patched.
import _signal  # type: ignore[import-not-found]
import _thread
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

from torchdevice.calls.mode import DeviceMode, as_program, of_this_thread, with_mode
from torchdevice.calls.rewriters import DROPS, rewrites
from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.journal.callers import PROGRAM, kind_of
from torchdevice.kernel.patching import Replaced, in_every_thread, put_in, take_out
from torchdevice.kernel.python.per_thread import readable_early
from torchdevice.kernel.torch_internals import is_torch_function_all_disabled

F = TypeVar("F", bound=Callable[..., Any])


@readable_early
class _Thread(threading.local):
    """The entry of a thread's collection in progress."""

    def __init__(self) -> None:
        self.entered: list[AbstractContextManager[Any]] = []


_collecting = _Thread()


def _begin(phase: str, info: Mapping[str, int]) -> None:
    if phase != "start":
        return
    # The program has added one, which runs in between.
    if gc.callbacks[-1] is not _end and _end in gc.callbacks:
        gc.callbacks.remove(_end)
        gc.callbacks.append(_end)
    _leave()  # an interrupt kept the end of an earlier collection from it
    context = thread_state.state.context
    if context is None:
        return
    # The mode handles a call with all function modes off; the collection came in its midst.
    if is_torch_function_all_disabled():
        _enter(torch._C._EnableTorchFunction())
    if of_this_thread() is None:
        _enter(thread_state.lent(DeviceMode(context), context))


def _end(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop":
        _leave()


# Not an ExitStack: an interrupt within its Python code could leave it between two states.
def _enter(manager: AbstractContextManager[Any]) -> None:
    # Noted first: an interrupt before entering leaves an exit that may be called without an entry.
    _collecting.entered.append(manager)
    manager.__enter__()


def _leave() -> None:
    while _collecting.entered:
        # Popped afterwards: after an interrupt it is left once more.
        _collecting.entered[-1].__exit__(None, None, None)
        _collecting.entered.pop()


def _install() -> None:
    """Lend the mode to collections from now on. Signal handlers wait until its callbacks end."""
    if _begin in gc.callbacks:
        _remove()
    gc.callbacks.insert(0, _begin)
    gc.callbacks.append(_end)


def _remove() -> None:
    """Lend it no more. May be called again, and by a destructor that a collection runs."""
    _leave()
    gc.callbacks[:] = [each for each in gc.callbacks if each is not _begin and each is not _end]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    with torch._C.DisableTorchFunction():
        return torch.Tensor.untyped_storage(tensor) if torch._C._has_storage(tensor) else None


_HELD: dict[Any, Any] = {
    torch.Tensor.grad.__set__: torch.Tensor.grad.__get__,  # type: ignore[union-attr]
    torch.Tensor.grad.__delete__: torch.Tensor.grad.__get__,  # type: ignore[union-attr]
    torch.Tensor._backward_hooks.__set__: torch.Tensor._backward_hooks.__get__,  # type: ignore[union-attr]
    torch.Tensor.detach_: torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    torch.detach_: torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    torch.Tensor.data.__set__: storage_of,  # type: ignore[attr-defined]
}
"""A function that makes a tensor drop an object -> the function that returns the object."""


@rewrites(*_HELD, table=DROPS)
def dropping(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drop an object by calling a function. A destructor that runs meanwhile has the mode."""
    return outliving(
        context, [_HELD[func](args[0] if args else kwargs["input"])], func, args, kwargs
    )


def outliving(
    context: Context, held: list[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function, and let the object in ``held`` go afterwards, with the mode."""
    result = func(*args, **kwargs)
    # A gradient or a storage usually ends without a function in Python.
    quiet = type(held[0]) in _QUIET and not weakref.getweakrefcount(held[0]) and not vars(held[0])
    if held[0] is not None and not quiet:
        with_mode(context, held.clear)
    return result


_QUIET = {torch.Tensor, torch.UntypedStorage}


# ---- handlers of signals -------------------------------------------------------------------------


# It takes the number of a signal since Python 3.10.
_interrupt: Callable[[int], None] = _thread.interrupt_main  # type: ignore[assignment]

_NUMBERS = [int(number) for number in signal.valid_signals()]

_handling: tuple[str, ...] = (
    registered_kernels.__file__,
    os.path.join(os.path.dirname(__file__), ""),
)
"""The file and the folders of the code that handles calls and runs operators: torch calls it below
autograd.
"""


def handles_calls(file: str) -> None:
    """Note that the code in the folder of a file runs operators. May be called again."""
    global _handling
    folder = os.path.join(os.path.dirname(file), "")
    if folder not in _handling:
        _handling = (*_handling, folder)


_OFF_THE_STACK = torch.overrides.handle_torch_function.__code__
"""Takes the mode off torch's stack for a call, and would lose it if a handler raised on the way."""


is_asked: Callable[[], bool] = bool
"""Whether torch asks the device guard, see ``simulation/device_guard.py``, which sets it."""


_open: dict[int, CodeType] = {}
"""The code of functions in whose calls handlers run, by its identity."""


def lets_handlers_run(function: F) -> F:
    """Let handlers run in what a function calls: code of the program, or a compiler for minutes.

    Returns:
        The function itself.
    """
    _open[id(function.__code__)] = function.__code__  # type: ignore[attr-defined]
    return function


lets_handlers_run(with_mode)


def _is_handled(frame: FrameType | None) -> bool:
    """Return whether a frame is in a torch call handled here, and runs no code of the program."""
    # By identity, because equality of code compares all of it.
    while frame is not None and id(frame.f_code) not in _open:
        if frame.f_code is _OFF_THE_STACK or frame.f_code.co_filename.startswith(_handling):
            return True
        if kind_of(frame) == PROGRAM:
            return False
        frame = frame.f_back
    return False


class _Waiting:
    """A handler of the program, deferred while this package works or torch asks the guard."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if not (is_asked() or _is_handled(frame)):
            try:
                return as_program(self.handler, number, frame)
            except BaseException as error:
                # For `_come_again`. Not by `setattr`, which a class may refuse.
                vars(error)[_OF_SIGNAL] = number
                raise
        # Python would run the handler again after a call in this function. Unpacking is none.
        (_,) = map(_interrupt, (number,))


_OF_SIGNAL = "_torchdevice_signal"


def _come_again(original: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a hook that sends a signal again if Python has lost its error.

    A call that is left drops objects, and their destructors are the first code in which a handler
    that has waited may run. torch's compiler has such destructors in Python. Python prints what
    they raise, and a Ctrl-C would do nothing.
    """

    # At the end of the process the names of this file are gone before the hook is.
    module = sys
    patch = _patches[0]
    interrupt = _interrupt
    mark = _OF_SIGNAL
    main_thread = threading.main_thread()

    # A function of this file, in which handlers wait: Python would lose their errors here too.
    def hook(unraisable: Any, /) -> None:
        if module.unraisablehook is hook and not patch.expected:
            module.unraisablehook = original  # a program has put back what it read in a scope
        number = getattr(unraisable.exc_value, "__dict__", {}).pop(mark, None)
        # Nothing is left to be interrupted where the main thread has ended: in exit handlers.
        if number is None or not main_thread.is_alive():
            original(unraisable)
        else:
            interrupt(number)

    return hook


def _own(handler: Any) -> Any:
    """Return the program's handler."""
    # `type`, not `isinstance`: a subclass is of the program.
    return handler.handler if type(handler) is _Waiting else handler


def _set(original: Any, signalnum: Any, handler: Any) -> Any:
    # SIG_DFL and SIG_IGN are integers, which Python handles in C.
    return _own(original(signalnum, _Waiting(handler) if callable(handler) else handler))


def _get(original: Any, signalnum: Any) -> Any:
    return _own(original(signalnum))


_patches = (
    Replaced(signal, "signal", in_every_thread(_set)),
    Replaced(signal, "getsignal", in_every_thread(_get)),
    Replaced(sys, "unraisablehook", _come_again),
)


def settle(in_a_scope: bool) -> None:
    """Defer handlers while the main thread is in a scope, and lend collections the mode.

    Does nothing in other threads. May be called again after an interrupt.
    """
    # Python runs handlers in the main thread only, and refuses `signal.signal` elsewhere.
    if (
        in_a_scope is _patches[0].expected
        or threading.current_thread() is not threading.main_thread()
    ):
        return
    if in_a_scope:
        # First, so that a handler set from here on is wrapped.
        put_in(_patches)
    else:
        _remove()
    # The C function, since the patched one would hide `_Waiting`.
    for number, handler in zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True):
        # Most are the system's own, numbers. None is a handler that Python has not installed: it
        # must not be touched.
        if callable(handler) and (type(handler) is _Waiting) is not in_a_scope:
            _signal.signal(number, _Waiting(handler) if in_a_scope else _own(handler))
    if in_a_scope:
        _install()
    else:
        take_out(_patches)  # last: until then the next exit looks at the handlers again
