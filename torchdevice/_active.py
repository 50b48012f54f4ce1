"""Which scope is active in this thread.

A thread's state is plain data of that thread. It is no ContextVar, because torch keeps its stack of function modes
per thread too: the two must agree, also when an asyncio task is suspended inside a ``with`` block.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from torchdevice._private import require

if TYPE_CHECKING:
    from torchdevice._mode import DeviceMode
    from torchdevice._scope import Activation, Scope


class ThreadState(threading.local):
    """The scopes entered in this thread, outermost first, and the innermost of them for quick reading.

    Attributes:
        entered: What was entered and not left.
        scope: The innermost scope.
        for_cuda: The same, if its target stands in for CUDA.
        mode: The mode that wrapped entry points of torch ask; None where torch itself asks one, or one is asked now.
        traced: That mode, while Dynamo traces a program.
        compiling: Whether a compiler of torch works for a program in a scope, while torch answers for itself.
    """

    def __init__(self) -> None:
        self.entered: list[Activation] = []
        self.scope: Scope | None = None
        self.for_cuda: Scope | None = None
        self.mode: DeviceMode | None = None
        self.traced: DeviceMode | None = None
        self.compiling = False


state = ThreadState()


def current() -> Scope | None:
    """Return the innermost scope entered in this thread, or None."""
    return state.scope


def make_current(scope: Scope | None) -> None:
    """Let what is guarded in this thread answer for ``scope``, or torch for itself where it is None."""
    state.scope = scope
    state.for_cuda = None if scope is None or scope.kind == "cuda" else scope
    if state.for_cuda is None:
        for state_of_family in _initializing:
            vars(state_of_family).pop("is_initializing", None)
    else:
        # In a thread that says it is initialising, torch neither initialises CUDA nor looks for NVIDIA's library.
        for state_of_family in _initializing:
            state_of_family.is_initializing = True


_initializing = [require(torch.cuda, "_tls"), require(torch.xpu, "_tls")]


@contextlib.contextmanager
def suspended(*, compiling: bool = False) -> Iterator[None]:
    """Let torch answer for itself in this thread: what is guarded by the active scope behaves as if there were none.

    Args:
        compiling: That a compiler works for a program in the scope, whose tensors it may make.
    """
    scope, mode, before = state.scope, state.mode, state.compiling
    make_current(None)
    state.mode, state.compiling = None, compiling
    try:
        yield
    finally:
        state.mode, state.compiling = mode, before
        make_current(scope)
