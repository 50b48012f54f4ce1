"""The mode: it passes a torch call to the function's rewriter, or on to torch."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from torchdevice.calls import lookup, rewriters
from torchdevice.calls.error_texts import OF_TORCH, detour_after_raised
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.python.interrupt_safe_exit import block
from torchdevice.kernel.torch_internals import is_torch_function_all_disabled

_UNSEEN = object()


def _find_nothing(func: Any, default: Any = None) -> None:
    """Return None, so that a mode that serves no context rewrites nothing."""


class DeviceMode(thread_state.ContextMode):
    """Handles every torch call of a thread. A thread has one mode; nested scopes set ``context``.

    The mode is on torch's stack, or beside it, where wrappers call it (``wrap.py``).

    Attributes:
        table: The rewriters for the context, see :func:`lookup.table_of`.
        find: ``table.get``. The handler does not use ``table``, because Dynamo would guard on its
            length, which grows.
        known: The answers of :meth:`Context.redirect` in this thread, for calls with a device that
            need nothing else.
    """

    def __init__(self, context: Context | None):
        super().__init__()
        self.context: Context | None = None
        self.table: rewriters.Table = {}
        self.find: Any = _find_nothing
        self.known: dict[Any, Any] = {}
        self.serve(context)

    def __reduce__(self) -> Any:
        # Compiled code that is kept on disk keeps its guards, which compare the context's key.
        return _with_key, ("" if self.context is None else self.context.devices.key,)

    def serve(self, context: Context | None) -> None:
        # Compared first, since nested scopes of one context call this at each entry.
        if context is not self.context:
            self.table = {} if context is None else lookup.table_of(context)
            self.find = _find_nothing if context is None else self.table.get
            if context is not None and context.devices.redirects_only:
                self.known = context.thread.redirects
            else:
                self.known = {}
            self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # One lookup for known functions; None is a valid answer, hence the sentinel.
        rewriter: Any = self.find(func, _UNSEEN)
        if rewriter is _UNSEEN:
            rewriter = lookup.classify(func, self.table)
        try:
            if rewriter is None:
                # Most calls have no keyword arguments, and passing an empty dictionary takes time.
                return func(*args, **kwargs) if kwargs else func(*args)
            return rewriter(self.context, func, args, kwargs or {})
        # Without a name for the error. `thread_state` reads this frame's variables, of which Python
        # keeps a copy with the frame, and an error in that copy would hold itself.
        except OF_TORCH:
            # The mode's scope has ended inside the call, so the error is none of ours to explain.
            if self.context is None:
                raise
            detour = detour_after_raised(self.context, func, rewriter)
            if detour is None:
                raise
        # Outside the `except` clause, so that the second attempt's error does not carry the first
        # as its context.
        return detour(args, kwargs or {})


def _with_key(key: str) -> DeviceMode:
    """Return a mode that serves nothing, for guards of compiled code that were kept on disk."""
    mode = DeviceMode(None)
    mode.context = types.SimpleNamespace(devices=types.SimpleNamespace(key=key))  # type: ignore[assignment]
    return mode


def of_this_thread() -> thread_state.ContextMode | None:
    """Return the mode that handles this thread's calls; None while it handles one."""
    if (beside := thread_state.state.mode) is not None:
        return beside
    stacked = thread_state.stacked_modes()
    # An interrupt may have lost the mode while torch had it off.
    if thread_state.state.stacked.keys() - stacked:
        thread_state.put_back_lost()
        stacked = thread_state.stacked_modes()
    for mode in stacked:
        if isinstance(mode, DeviceMode) and mode.context is not None:
            return mode
    return None


@block
def one_way() -> Iterator[None]:
    """Let each call of this thread that names a device take one way through this package's Python.

    ``torch.jit.trace`` traces twice, and compares graphs in which each operator has the line of
    Python that called it.
    """
    mode: Any = of_this_thread()
    if mode is None:
        yield
        return
    known = mode.known
    mode.known = {}
    try:
        yield
    finally:
        mode.known = known


def with_mode(context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function while a mode is active: this thread's own, or one pushed for the call."""
    # By a kernel of the simulated device that calls operators above autograd.
    if is_torch_function_all_disabled():
        with torch._C._EnableTorchFunction():
            return with_mode(context, function, *args, **kwargs)
    if of_this_thread() is not None:
        return function(*args, **kwargs)
    with thread_state.lent(DeviceMode(context), context):
        return function(*args, **kwargs)


def as_program(function: Any, *args: Any) -> Any:
    """Call a program's function that Python runs at any time, in the program's scope and mode."""
    context: Context | None = thread_state.innermost()
    if context is None or context.names.is_native:
        return function(*args)
    # The usual case, without another entry.
    if context is thread_state.state.context:
        return with_mode(context, function, *args)
    with thread_state.entered(thread_state.Entry(context)):  # a compiler has suspended the scope
        return with_mode(context, function, *args)
