"""What a scope is asked while Dynamo traces a program: answered when it is traced, and a constant of the compiled code.

Dynamo traces the mode and its rewriters like any Python. It takes what these functions return as it is, without looking
inside; they are given nothing but constants, so that nothing of one scope is guarded on but its key: code compiled in
one scope serves every other with the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from torchdevice import _active

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


def _scope() -> Any:
    return _active.state.entered[-1].scope


@_constant
def redirect(key: str, value: Any) -> torch.device | None:
    """``Scope.redirect``."""
    return _scope().redirect(value)


@_constant
def fit_dtype(key: str, dtype: torch.dtype) -> torch.dtype:
    """``Scope.fit_dtype``."""
    return _scope().fit_dtype(dtype)


@_constant
def report(key: str, requested: str, done: str, fidelity: str) -> bool:
    """``Scope.report``."""
    from torchdevice._journal import Fidelity

    return _scope().report(requested, done, Fidelity(fidelity))


NUMBERED: list[Any] = [None]
"""Every rewriter, None for no rewriter: what a constant cannot be, its place in a list can."""


@_constant
def number_of(func: Any) -> int:
    """Return the place of a function's rewriter."""
    from torchdevice import _rewriters

    return NUMBERED.index(_rewriters.rewriter_of(_scope(), func))


def number(rewriters: Iterable[Any]) -> None:
    """Give rewriters their places. Before Dynamo begins: it sees the list as it was then."""
    NUMBERED.extend(set(rewriters).difference(NUMBERED))
