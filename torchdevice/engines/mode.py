"""The mode: look a torch call up, hand it to its rewriter, or call it as it is. Nothing else."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.engines import rewriters
from torchdevice.engines.error_texts import OF_TORCH, reword
from torchdevice.thread_state import ContextMode
from torchdevice.torch_internals import require

_UNSEEN = object()

_all_disabled = require(torch._C, "_is_torch_function_all_disabled")
_enable = require(torch._C, "_EnableTorchFunction")


def _find_nothing(func: Any, default: Any = None) -> None:
    """Find no rewriter: the mode serves no context any more."""


class DeviceMode(ContextMode):
    """Sees every torch call of a thread. There is one in a thread: nested scopes exchange its ``context``.

    The mode is on torch's stack, or beside it and asked by wrappers (``wrap.py``).

    Attributes:
        table: The rewriters of the context's kind.
        find: ``table.get``. Dynamo would guard on the length of a table, which grows by what is seen.
    """

    def __init__(self, context: Context | None):
        super().__init__()
        self.context: Context | None = None
        self.table: rewriters.Table = {}
        self.find: Any = _find_nothing
        self.serve(context)

    def serve(self, context: Context | None) -> None:
        if context is not self.context:
            self.table = {} if context is None else rewriters.table_of(context)
            self.find = _find_nothing if context is None else self.table.get
            self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rewriter: Any = self.find(func, _UNSEEN)
        if rewriter is _UNSEEN:
            rewriter = rewriters.classify(func, self.table)
        try:
            if rewriter is None:
                return func(*args, **kwargs) if kwargs else func(*args)
            return rewriter(self.context, func, args, kwargs or {})
        except OF_TORCH as error:
            if self.context is not None:
                reword(self.context, error)
            raise


def of_this_thread() -> ContextMode | None:
    """Return the mode that sees this thread's calls, beside torch's stack or on it; None while it handles one."""
    if thread_state.state.mode is not None:
        return thread_state.state.mode
    for mode in thread_state.stacked_modes():
        if isinstance(mode, DeviceMode) and mode.context is not None:
            return mode
    return None


def with_mode(context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with a mode that sees what it does. Where there is none already, one is put on torch's stack."""
    if _all_disabled():  # by a kernel of the simulated device that calls operators above autograd
        with _enable():
            return with_mode(context, function, *args, **kwargs)
    if of_this_thread() is not None:
        return function(*args, **kwargs)
    with DeviceMode(context):
        return function(*args, **kwargs)
