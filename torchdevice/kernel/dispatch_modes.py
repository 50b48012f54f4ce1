"""Puts dispatch modes on a thread's stack and takes them off in any order, on several threads.

torch keeps in variables of the process, not of a thread, that some mode is entered, and each mode
restores at its end what it found at its beginning. Modes of two threads would leave these variables
wrong. So they are set here for all modes of this package together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch

from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.python import forks
from torchdevice.kernel.python.interrupt_safe_exit import block

_stack = _python_dispatch._get_current_dispatch_mode_stack
_pop = _python_dispatch._pop_mode
_push = _python_dispatch._push_mode


_lock = forks.lock(globals())

_entered: set[_python_dispatch.TorchDispatchMode] = set()
_variables = _python_dispatch.TorchDispatchMode()
"""A mode that is never on the stack of a call: entering it sets torch's variables."""


def enter(mode: _python_dispatch.TorchDispatchMode) -> None:
    """Put a mode on this thread's stack."""
    with _lock:
        if not _entered:
            _variables.__enter__()
            _pop()
        _entered.add(mode)
    _push(mode)


def leave(mode: _python_dispatch.TorchDispatchMode) -> None:
    """Take a mode off this thread's stack, also from below others; no-op if it is not there."""
    if mode not in _stack():
        return
    above = []
    while _stack()[-1] is not mode:
        above.append(_pop())
    _pop()
    for each in reversed(above):
        _push(each)
    with _lock:
        _entered.discard(mode)
        if _entered:
            return
        if above:
            # The next mode found the variables set when it began, and would leave them set. It
            # restores the values that `_variables` would have restored.
            heir = above[-1]
            times = sum(each is heir for each in above)
            for name in _KEPT:
                getattr(heir, name)[-times] = getattr(_variables, name).pop()
        else:
            _push(_variables)
            _variables.__exit__(None, None, None)


_KEPT = (
    "old_dispatch_mode_flags",
    "old_non_infra_dispatch_mode_flags",
    "old_without_ignore_compile_internals_dispatch_mode_flags",
)
"""The attributes of a mode with the states to restore, the last entry last."""


def is_tracing() -> bool:
    """Return whether a compiler's mode, such as fake tensors', sees this thread's operators."""
    return any(mode.is_infra_mode() for mode in _stack())


def run(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that a dispatch mode handles, as torch does without the mode.

    Neither a function mode nor a wrapper in the operator's place sees a call. In backward they
    would see one otherwise.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return func(*args, **kwargs)
    if not torch._C._is_torch_function_mode_enabled():
        return func._op(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return func._op(*args, **kwargs)


class Operators(_python_dispatch.TorchDispatchMode):
    """Lets an observer run a thread's operators as kernels, on every device, also those in C++.

    The engine of autograd gives the mode to its threads, so that the observer sees backward
    operators there too.

    Args:
        observer: The observer. Its ``run`` gets the operator, the function that runs it, and the
            arguments.
    """

    supports_higher_order_operators = True

    def __init__(self, observer: Observer):
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._observer.run(func, functools.partial(run, func), args, kwargs or {})


@block
def lifted() -> Iterator[None]:
    """Take this package's modes off this thread's stack during a call that refuses modes."""
    mine = [mode for mode in _stack() if mode in _entered]
    for mode in mine:
        leave(mode)
    try:
        yield
    finally:
        for mode in mine:
            enter(mode)
