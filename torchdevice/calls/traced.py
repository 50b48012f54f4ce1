"""Functions that Dynamo traces in place of parts of this package.

Dynamo traces the mode and its rewriters like any Python code. It calls the functions marked here as
constant while it traces, and their results are constants of the compiled code. Their arguments are
constants too, so the context's key is all of the context that compiled code is guarded by: code
compiled in one scope serves every scope with an equal key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchdevice.calls import interruptions, lookup, moves, rewriters
from torchdevice.calls.lacking import float64_policy, half_precision_matmul
from torchdevice.calls.mode import DeviceMode
from torchdevice.kernel import stand_ins
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.thread_state import innermost
from torchdevice.kernel.thread_values import ThreadValues

F = TypeVar("F", bound=Callable[..., Any])


def _constant(function: F) -> F:
    # ``torch._dynamo.assume_constant_result``, without the import of Dynamo.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_place_of(function: Any) -> Callable[[F], F]:
    """Return a decorator that lets Dynamo trace a function in place of ``function``."""

    def register(traced: F) -> F:
        function._torchdynamo_inline = traced
        return traced

    return register


def with_nothing_in_place(function: F) -> F:
    """Let Dynamo trace nothing in place of a function that only checks. Return the function."""
    in_place_of(function)(lambda *args, **kwargs: None)
    return function


OTHERS: set[str] = set()
"""Further files of this kind. A feature adds its own when it is imported."""


@functools.cache  # entering and leaving a scope ask, once Dynamo is imported
def files() -> frozenset[str]:
    """Return the files of this package whose functions Dynamo traces with a program's code."""
    in_files: Any = (
        DeviceMode,
        Context,
        ThreadValues,
        moves,
        float64_policy,
        half_precision_matmul,
        stand_ins,
    )
    return frozenset(
        {
            __file__,
            *OTHERS,
            *map(inspect.getfile, (*in_files, *filter(None, rewriters.REGISTERED.values()))),
        }
    )


@_constant
def _redirected(key: str, current_device: str, value: Any) -> torch.device | None:
    return innermost().redirect(value)


@_constant
def _fitting(key: str, dtype: torch.dtype) -> torch.dtype:
    return float64_policy.fit(innermost(), dtype)


@_constant
def _reported(key: str, requested: str, done: str, fidelity: str) -> None:
    innermost().report(requested, done, Fidelity(fidelity))


# As a text: between ranks, Dynamo of torch 2.11 compares the numbers of a graph by names, and gives
# a constant another name at each attempt.
@_constant
def _number_of(key: str, func: Any) -> str:
    return str(lookup.NUMBERED.index(lookup.rewriter_of(lookup.table_of(innermost()), func)))


@in_place_of(Context.redirect)
def _redirect(self: Context, value: Any, above: int = 2) -> torch.device | None:
    # Reading the current device adds a guard on it. Only a spelling without an ordinal needs that.
    indexless = ":" not in value if value.__class__ is str else getattr(value, "index", 0) is None
    return _redirected(self.devices.key, self.thread.device_text if indexless else "", value)


in_place_of(float64_policy.fit)(lambda context, dtype: _fitting(context.devices.key, dtype))


@in_place_of(Context.report)
def _report(self: Context, requested: str, done: str, fidelity: Fidelity) -> None:
    _reported(self.devices.key, requested, done, fidelity.value)


# A traced tensor has no memory yet, so its side is unknown. A move without effect adds no copy to a
# graph, as the compilers themselves drop every copy that is not needed.
in_place_of(moves.moved)(lambda context, tensor, result, to: result)
in_place_of(moves.created)(lambda context, source, result, asked, target: result)
in_place_of(moves.created_by_default)(lambda func, args, kwargs, result: result)
in_place_of(moves.made_of)(lambda context, source, result, to: result)
in_place_of(moves.followed)(lambda source, result: result)
in_place_of(moves.mark)(lambda tensor, side: tensor)
in_place_of(moves.side_of)(lambda tensor: None)
in_place_of(rewriters.note_memory)(lambda context: None)
in_place_of(moves.side_meant)(lambda context, device, target: None)
in_place_of(moves.device_meaning)(lambda context, device, side: device)
in_place_of(moves.spells_host)(lambda context, text: False)
in_place_of(interruptions.dropping)(lambda context, func, args, kwargs: func(*args, **kwargs))


@in_place_of(DeviceMode.__torch_function__)
def _handle(self: DeviceMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Handle a call as :meth:`DeviceMode.__torch_function__` does.

    Rewriters are looked up by number, because Dynamo would guard on the table's length.
    """
    number = int(_number_of(self.context.devices.key, func))  # type: ignore[union-attr]
    rewriter = lookup.NUMBERED[number]
    if func is torch.Tensor.unflatten:
        # Dynamo has no way through its super() where a mode calls it, and one through its twin.
        func = torch.unflatten
    if rewriter is None:
        return func(*args, **kwargs) if kwargs else func(*args)
    return rewriter(self.context, func, args, kwargs or {})  # type: ignore[arg-type]
