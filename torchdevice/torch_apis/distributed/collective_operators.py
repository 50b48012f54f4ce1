"""Collectives as torch's ``c10d`` operators, which dispatch modes, profilers and tracers see.

torch's own group in C++ calls the operators. Their kernels would ask that group for a backend in C++, so a mode below
all others of the thread runs the collective of a group in Python instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch

from torchdevice.foundation import dispatch_modes
from torchdevice.foundation.interrupt_safe_exit import block

_stack = _python_dispatch._get_current_dispatch_mode_stack
_pop, _push = _python_dispatch._pop_mode, _python_dispatch._push_mode


class _Kernel(_python_dispatch.TorchDispatchMode):
    """Runs a collective in place of the kernel of its operator.

    Args:
        collective: Is called with the operator's tensors, or lists of them, and returns work.
    """

    def __init__(self, collective: Callable[..., Any]):
        super().__init__()
        self._collective = collective
        self._work: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import Dynamo in every distributed program

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the work, after the tensors that the operator changes if its schema returns them."""
        if func.namespace != "c10d":  # the tensor that torch makes for a barrier
            return dispatch_modes.run(func, args, kwargs or {})
        group = next(place for place, each in enumerate(args) if isinstance(each, torch.ScriptObject))
        # Kept until the call returns, since torch's C++ keeps only its own part of it.
        self._work = self._collective(*args[:group])
        boxed = self._work.boxed()
        return (args[0], boxed) if len(func._schema.returns) > 1 else boxed


def as_operator(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a method of a group that calls the operator, whose kernel is the method given.

    Args:
        method: A collective. Its first arguments are the operator's tensors.
        name: The name of the method of torch's group.
    """
    # Without the group, and the options or the tag at the end.
    tensors = len(inspect.signature(method).parameters) - 2

    @functools.wraps(method)
    def called(self: Any, *args: Any) -> Any:
        def collective(*given: Any) -> Any:
            # A mode may have called the operator with other tensors.
            given = given[:tensors]
            return method(self, *given, *args[len(given) :])

        # Neither a function mode nor a subclass of tensors sees a method of torch's group.
        with torch._C.DisableTorchFunction(), _innermost(_Kernel(collective)):
            return getattr(self.in_cpp, name)(*args)

    return called


@block
def _innermost(mode: _python_dispatch.TorchDispatchMode) -> Iterator[None]:
    """Put a mode below all others of this thread's stack, but for those that stand for torch's compilers."""
    above = _stack()
    if any(each.is_infra_mode() for each in above):  # they compute shapes only, or record the operator
        yield
        return
    try:
        _become([mode, *above])
        yield
    finally:
        _become(above)


def _become(modes: list[_python_dispatch.TorchDispatchMode]) -> None:
    """Replace this thread's stack of modes."""
    while _stack():
        _pop()
    for mode in modes:
        _push(mode)
