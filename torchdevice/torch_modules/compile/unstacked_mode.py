"""Patches of Dynamo for ``engine="wrap"``, whose mode is beside torch's stack.

Dynamo traces the modes on torch's stack and guards on them. While Dynamo traces, these patches add
the thread's mode to the modes it traces, with a source of its own for guards, so that compiled code
needs no mode on the stack. Dynamo traces a wrapped entry point as its original function; the call
is rewritten by the mode.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from torchdevice.calls import wrap
from torchdevice.errors import FidelityError
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import (
    Added,
    Patch,
    Replaced,
    ReplacedItem,
    in_every_thread,
    replaced_function,
)
from torchdevice.kernel.python.per_thread import having
from torchdevice.kernel.thread_state import ContextMode, state

_BESIDE = 1 << 20
"""The stack index of the mode beside the stack, for :func:`_mode_at`. Dynamo adds or subtracts
small numbers.
"""


class GraphRefusedError(FidelityError):
    """A strict scope refuses to run a whole graph uncompiled.

    It reaches the program as it is, because the frame run by Python would raise nothing.
    """


def _trace_frame(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace a frame while Dynamo's own calls, with fake tensors, reach no mode.

    A frame in which a strict scope refuses something is not compiled, so that the program's own
    line raises the error.
    """
    try:
        # Wrappers call nothing meanwhile; guards find the mode under `traced`. Frames are traced
        # inside each other.
        with having(state, mode=None, traced=state.mode):
            return original(*args, **kwargs)
    except GraphRefusedError:
        raise
    except FidelityError as error:
        # Dynamo then runs the frame by Python, where the program's own line raises.
        raise torch._dynamo.exc.Unsupported(str(error)) from error


def _see_mode(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend ``SymbolicTorchFunctionState.__init__``: the unstacked mode is the topmost."""
    original(self, *args, **kwargs)
    if state.traced is not None:
        source = torch._dynamo.source.TorchFunctionModeStackSource(_BESIDE)
        # Lazy, so that Dynamo guards on the mode only where the frame uses it.
        self.mode_stack.append(
            torch._dynamo.variables.lazy.LazyVariableTracker.create(state.traced, source=source)
        )


def source_of_mode() -> Any:
    """Return the source that guards read this thread's mode from; None without a mode."""
    source = torch._dynamo.source.TorchFunctionModeStackSource
    if state.traced is not None:
        return source(_BESIDE)
    stack = _get_current_function_mode_stack()
    serving = (
        i
        for i, mode in enumerate(stack)
        if isinstance(mode, ContextMode) and mode.context is not None
    )
    return next((source(index) for index in serving), None)


class _DefaultDevice:
    """``torch.utils._device.CURRENT_DEVICE``, unequal to all values in threads with such a mode.

    Dynamo guards all compiled code on the default device. So code that was compiled outside a scope
    does not run inside, where no other guard of that code would fail.
    """

    def __init__(self, original: Any):
        self.original = original

    def __eq__(self, other: object) -> bool:
        if state.mode is not None or state.traced is not None:
            # Equal to itself only, so guards of code from outside fail in this thread.
            return other is self
        return bool(
            self.original == (other.original if isinstance(other, _DefaultDevice) else other)
        )

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)


def _guard_default_device(original: Any, self: Any, guard: Any) -> Any:
    """Extend ``GuardBuilder.DEFAULT_DEVICE``: guard torch's value in threads without a mode."""
    module: Any = torch.utils._device
    present: Any = module.CURRENT_DEVICE
    # In the other threads torch's own value is to be guarded, not this object.
    if (
        not isinstance(present, _DefaultDevice)
        or state.mode is not None
        or state.traced is not None
    ):
        return original(self, guard)
    with having(module, CURRENT_DEVICE=present.original):
        return original(self, guard)


def _mode_at(original: Any) -> Any:
    """Replace the function that looks a mode up for guards and compiled code."""

    @functools.wraps(original)
    def get_torch_function_mode_stack_at(ind: int) -> Any:
        # A real stack is never half as deep as the marker, whatever small number Dynamo adds.
        return original(ind) if ind < _BESIDE // 2 else state.mode or state.traced

    return get_torch_function_mode_stack_at


def _set_stack(context: Context, original: Any, stack: list[Any]) -> None:
    """Set torch's stack for compiled code, without the traced mode that stays beside the stack."""
    # Compiled code restores the stack that was traced, and the mode was never on it.
    original([mode for mode in stack if mode is not state.mode])


def names_in_guards() -> dict[str, Any]:
    """Return the names that guard expressions can use; torch collects them once in a process."""
    return torch._dynamo.guards._get_closure_vars()


def _wrap_original(builder: Any, entry: wrap.EntryPoint) -> Any:
    # With the original's source: the guard of a function's defaults takes only functions.
    source = torch._dynamo.source.AttrSource(builder.source, "original")
    return type(builder)(builder.tx, source)._wrap(entry.original)


def _create_original(tx: Any, entry: wrap.EntryPoint) -> Any:
    return torch._dynamo.variables.builder.SourcelessBuilder.create(tx, entry.original)


def patches() -> list[Patch]:
    """Return the patches of Dynamo, once it is imported."""
    dynamo: Any = torch._dynamo
    modes = dynamo.variables.torch_function
    builders = dynamo.variables.builder
    classes = tuple(wrap.kinds())
    return [
        ReplacedItem(names_in_guards(), "___get_torch_function_mode_stack_at", _mode_at),
        replaced_function(dynamo.convert_frame, "trace_frame", _trace_frame),
        replaced_function(modes.SymbolicTorchFunctionState, "__init__", _see_mode),
        *(
            Replaced(module, "get_torch_function_mode_stack_at", _mode_at)
            for module in (dynamo.utils, dynamo.guards)
        ),
        replaced_function(dynamo.utils, "set_torch_function_mode_stack", _set_stack),
        Replaced(torch.utils._device, "CURRENT_DEVICE", _DefaultDevice),
        Replaced(
            dynamo.guards.GuardBuilder, "DEFAULT_DEVICE", in_every_thread(_guard_default_device)
        ),
        # Dynamo traces entry points as the originals. It finds builders by the exact class.
        Added(builders.VariableBuilder._type_dispatch(), dict.fromkeys(classes, _wrap_original)),
        Added(builders.SourcelessBuilder._type_handlers, dict.fromkeys(classes, _create_original)),
    ]
