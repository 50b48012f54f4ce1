"""Puts the mode back while the autograd engine runs Python code of the program.

torch takes the mode off the stack while it handles a torch function, such as ``Tensor.backward`` or
an operator that saves a tensor. Without these patches the mode would not see the torch calls of
custom ``Function.backward`` methods, hooks, checkpoint recomputation, hooks that pack saved tensors
and custom functions under ``torch.func``.

The error that a device guard in Python had to take away goes on here, see
``simulation/device_guard.py``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from torchdevice.calls.error_texts import OF_TORCH, reword
from torchdevice.calls.mode import with_mode
from torchdevice.calls.rewriters import rewrites
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.current_streams import following_nodes
from torchdevice.kernel.patching import per_context
from torchdevice.kernel.python.interrupt_safe_exit import Exit, LeavingBy
from torchdevice.kernel.python.per_thread import PerThread

_STEPS = ("forward", "setup_context", "backward", "jvp", "vmap")
"""The methods that a program writes in a custom function."""


taken = PerThread(error=None)
"""The error that a device guard took away from this thread's engine, if any."""


@replaces(torch.autograd.Variable, "_execution_engine", makes=True)
def _engine(original: Any) -> Any:
    """Return an engine for torch's functions, and for programs that call it, as pipelines do."""
    engine = type("_ImperativeEngine", (type(original),), {})()
    engine.run_backward = per_context(original.run_backward, _run_backward)
    return engine


def _run_backward(context: Context, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the engine with the mode, and raise the error that was taken away on its way."""
    taken.error = None
    context.runtime.note_memory()
    context.observers.tell("backward_began")
    try:
        with _in_this_thread(), _on_streams_of_forward(context, tensors):
            return with_mode(context, original, tensors, *args, **kwargs)
    except SystemError as error:  # what Python makes of an error that is gone
        raised = error if taken.error is None else taken.error
    except OF_TORCH as error:
        reword(context, error)  # no torch function is called with engine="wrap"
        raise
    finally:
        if taken.error is not None:
            taken.error = None
            context.runtime.supplied.after_error_in_backward()
        context.runtime.note_memory()
    try:
        raise raised  # here, so that the SystemError is not noted as its context
    finally:
        del raised


def _in_this_thread() -> contextlib.AbstractContextManager[None]:
    """Let the engine work in the calling thread, which is in the scope.

    It would run the backward of an accelerator's operators in a thread of its own for each device,
    where no scope is active: neither for the program's hooks and custom functions, nor for
    operators that run on the CPU.
    """
    if torch._C._is_multithreading_enabled():
        # The tensors may be of an outer scope.
        for entry in thread_state.state.entries:
            if entry.context is not None and not entry.context.runtime.shares_host_memory:
                return _ONE_THREAD
    return _NO_CHANGE


class _OneThread:
    """Keeps autograd's engine, which has threads of its own, in the calling thread."""

    def __enter__(self) -> None:
        torch._C._set_multithreading_enabled(False)

    __exit__ = Exit(
        lambda _: LeavingBy(functools.partial(torch._C._set_multithreading_enabled, True))
    )


_ONE_THREAD, _NO_CHANGE = _OneThread(), contextlib.nullcontext()


def _on_streams_of_forward(context: Context, roots: Any) -> contextlib.AbstractContextManager[None]:
    """Run each node on its forward's stream, after the node before it and before the next."""
    if not context.runtime.supplied.has_handles or not context.thread.streams.history.has_changes:
        return _NO_CHANGE

    def wait(index: int, before: int, now: int) -> None:
        context.observers.tell("event_created", _ENGINE)
        context.observers.tell("event_recorded", _ENGINE, (index, before))
        context.observers.tell("event_waited", _ENGINE, (index, now))
        context.observers.tell("event_deleted", _ENGINE)

    return following_nodes(context.thread, roots, wait)


_ENGINE = -1
"""The number of the events that the engine orders streams with; those of the program are positive.
"""


@replaces(torch.autograd.graph.saved_tensors_hooks, "__init__")
def _init_hooks(
    context: Context, original: Any, self: Any, pack_hook: Any, unpack_hook: Any
) -> None:
    """``saved_tensors_hooks``: put the mode back while either hook runs."""
    original(self, _in_mode(context, pack_hook), _in_mode(context, unpack_hook))


def _in_mode(context: Context, hook: Any) -> Any:
    called = functools.partial(with_mode, context, hook)
    # torch knows the hooks of its checkpoints by an attribute.
    called.__dict__.update(getattr(hook, "__dict__", {}))
    return called


@replaces(torch.autograd.function.BackwardCFunction, "apply", "apply_boxed", optional=True)
def _run_node(context: Context, original: Any, self: Any, *args: Any) -> Any:
    """Let the stream be that of a custom function's forward before its backward begins.

    It would be so at the first question for the stream. But nodes that backward makes, as
    checkpoints do, are counted to the stream before them, and the first of them is made before its
    kernel asks.
    """
    context.thread.streams.get(0)
    return original(self, *args)


@rewrites(torch._functorch.autograd_function.custom_function_call)
def _transformed(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A custom function under ``torch.func``, whose Python torch calls as a torch function's."""
    function, *operands = args
    steps = {
        name: staticmethod(functools.partial(with_mode, context, getattr(function, name)))
        for name in _STEPS
        # Torch asks which are overridden.
        if getattr(function, name) is not getattr(torch.autograd.Function, name)
    }
    return func(type(function.__name__, (function,), steps), *operands, **kwargs)
