"""What Dynamo traces in place of parts of this package, and what such code asks of the active context.

Dynamo traces the mode and its rewriters like any Python. The functions marked here as constant are called while a
program is traced, and what they return is a constant of the compiled code. They are given nothing but constants, so
that compiled code is guarded by nothing of a context but its key: code compiled in one scope serves every other with
the same key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchdevice import placement, thread_state
from torchdevice.context import Context
from torchdevice.engines import rewriters
from torchdevice.engines.mode import DeviceMode
from torchdevice.fidelity import Fidelity

F = TypeVar("F", bound=Callable[..., Any])


def _constant(function: F) -> F:
    # What torch._dynamo.assume_constant_result does, without importing Dynamo.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_place_of(function: Any) -> Callable[[F], F]:
    """Let Dynamo trace a function in place of another."""

    def register(traced: F) -> F:
        function._torchdynamo_inline = traced
        return traced

    return register


def with_nothing_in_place(function: F) -> F:
    """Let Dynamo trace nothing in place of a function that only checks. Return the function."""
    in_place_of(function)(lambda *args, **kwargs: None)
    return function


def files() -> set[str]:
    """Return the files whose code Dynamo traces with a program; it leaves the rest of this package to Python."""
    return {
        __file__,
        inspect.getfile(DeviceMode),
        inspect.getfile(Context),
        inspect.getfile(placement),
        *(inspect.getfile(rewriter) for rewriter in rewriters.REGISTERED.values() if rewriter is not None),
    }


def _context() -> Context:
    return next(entry.context for entry in reversed(thread_state.state.entries) if entry.context is not None)


@_constant
def _redirected(key: str, current_device: str, value: Any) -> torch.device | None:
    return _context().redirect(value)


@_constant
def _fitting(key: str, dtype: torch.dtype) -> torch.dtype:
    return _context().fit_dtype(dtype)


@_constant
def _reported(key: str, requested: str, done: str, fidelity: str) -> bool:
    return _context().report(requested, done, Fidelity(fidelity))


@_constant
def _number_of(key: str, func: Any) -> int:
    return rewriters.NUMBERED.index(rewriters.rewriter_of(rewriters.table_of(_context()), func))


@in_place_of(Context.redirect)
def _redirect(self: Context, value: Any) -> torch.device | None:
    # The current device is read only for a spelling without an ordinal: other code serves every current device.
    indexless = ":" not in value if value.__class__ is str else getattr(value, "index", 0) is None
    return _redirected(self.key, self.thread.device_text if indexless else "", value)


in_place_of(Context.fit_dtype)(lambda self, dtype: _fitting(self.key, dtype))
in_place_of(Context.report)(
    lambda self, requested, done, fidelity: _reported(self.key, requested, done, fidelity.value)
)

# A tensor that is traced has no memory yet, so nothing is known of its side. In a graph, a move that moves nothing is
# left out, as the compilers leave out every copy that they need not make.
in_place_of(placement.moved)(lambda context, tensor, result, to: result)
in_place_of(placement.created)(lambda context, source, result, to: result)
in_place_of(placement.created_by_default)(lambda func, args, kwargs, result: result)
in_place_of(placement.made_of)(lambda context, source, result, to: result)
in_place_of(placement.followed)(lambda source, result: result)
in_place_of(placement.mark)(lambda tensor, side: tensor)
in_place_of(placement.side_of)(lambda tensor: None)
in_place_of(placement.side_meant)(lambda context, device, target: None)
in_place_of(placement.device_meaning)(lambda context, device, side: device)
in_place_of(placement.spells_host)(lambda context, text: False)


@in_place_of(DeviceMode.__torch_function__)
def _handle(self: DeviceMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Handle a call as :meth:`DeviceMode.__torch_function__` does.

    Rewriters are looked up by number, because Dynamo would guard on the table's length.
    """
    rewriter = rewriters.NUMBERED[_number_of(self.context.key, func)]  # type: ignore[union-attr]
    if rewriter is None:
        return func(*args, **kwargs) if kwargs else func(*args)
    return rewriter(self.context, func, args, kwargs or {})  # type: ignore[arg-type]
