"""Dynamo and the engine without a mode on the stack.

Dynamo traces the modes that it finds on torch's stack, and guards on them. The thread's mode is shown to it as one more
mode while it traces, with a source of its own, so that compiled code runs without any mode on the stack. The wrapped
entry points are shown to it as what they stand for: the mode says what becomes of the call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.engines.wrap import EntryPoint, LastResort
from torchdevice.errors import FidelityError
from torchdevice.patching import Callback, Patch, Replaced, ReplacedItem, replaced_function
from torchdevice.thread_state import ContextMode
from torchdevice.torch_internals import require

_state = thread_state.state


_BESIDE = 1 << 20
"""The index that means the mode beside the stack to :func:`_mode_at`; Dynamo adds or subtracts a few."""


class GraphRefusedError(FidelityError):
    """A strict scope refuses what a compiler would make of a whole graph; the frame without it raises nothing."""


def _trace_frame(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Where Dynamo traces a frame: what it runs meanwhile, with fake tensors, asks no mode.

    A frame in which a strict scope refuses something is not compiled, so that the program's own line raises the error.
    """
    before = _state.mode, _state.traced
    _state.mode, _state.traced = None, _state.mode
    try:
        return original(*args, **kwargs)
    except GraphRefusedError:
        raise
    except FidelityError as error:
        raise require(torch._dynamo.exc, "Unsupported")(str(error)) from error
    finally:
        _state.mode, _state.traced = before


def _see_mode(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """What Dynamo knows of the modes where it begins to trace a frame: the one beside the stack is the topmost."""
    original(self, *args, **kwargs)
    if _state.traced is not None:
        source = torch._dynamo.source.TorchFunctionModeStackSource(_BESIDE)
        self.mode_stack.append(torch._dynamo.variables.lazy.LazyVariableTracker.create(_state.traced, source=source))


def source_of_mode() -> Any:
    """Return how guards of the frame that is traced find this thread's mode; None where it has none."""
    source = torch._dynamo.source.TorchFunctionModeStackSource
    if _state.traced is not None:
        return source(_BESIDE)
    stack = _get_current_function_mode_stack()
    serving = (i for i, mode in enumerate(stack) if isinstance(mode, ContextMode) and mode.context is not None)
    return next((source(index) for index in serving), None)


class _DefaultDevice:
    """``torch.utils._device.CURRENT_DEVICE``: in a thread with a mode beside the stack it equals no other value.

    Dynamo compares the default device for all code that it compiled. So code that was compiled outside a scope, of
    which nothing else tells that there is a scope now, is not served inside.
    """

    def __init__(self, original: Any):
        self.original = original

    def __eq__(self, other: object) -> bool:
        if _state.mode is not None or _state.traced is not None:
            return other is self
        return bool(self.original == (other.original if isinstance(other, _DefaultDevice) else other))

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)


def _guard_default_device(original: Any) -> Any:
    """Where Dynamo notes the default device: a thread without such a mode notes torch's own."""

    @functools.wraps(original)
    def DEFAULT_DEVICE(self: Any, guard: Any) -> Any:
        module: Any = torch.utils._device
        present: Any = module.CURRENT_DEVICE
        if not isinstance(present, _DefaultDevice) or _state.mode is not None or _state.traced is not None:
            return original(self, guard)
        module.CURRENT_DEVICE = present.original
        try:
            return original(self, guard)
        finally:
            module.CURRENT_DEVICE = present  # type: ignore[assignment]

    return DEFAULT_DEVICE


def _mode_at(original: Any) -> Any:
    """How guards and compiled code look a mode up."""

    @functools.wraps(original)
    def get_torch_function_mode_stack_at(ind: int) -> Any:
        return original(ind) if ind < _BESIDE // 2 else _state.mode or _state.traced

    return get_torch_function_mode_stack_at


def _set_stack(context: Context, original: Any, stack: list[Any]) -> None:
    """Where compiled code sets the stack to what it was traced to be: the mode beside it stays there."""
    original([mode for mode in stack if mode is not _state.mode])


def names_in_guards() -> dict[str, Any]:
    """Return what the expressions of guards know by name, collected once in a process."""
    return require(torch._dynamo.guards, "_get_closure_vars")()


def _show_originals() -> None:
    builder = torch._dynamo.variables.builder
    variable_builder: Any = require(builder, "VariableBuilder")
    sourceless: Any = require(builder, "SourcelessBuilder")
    for cls in _CLASSES:
        require(variable_builder, "_type_dispatch")()[cls] = lambda self, entry: self._wrap(entry.original)
        require(sourceless, "_type_handlers")[cls] = lambda tx, entry: sourceless.create(tx, entry.original)


def _show_nothing() -> None:
    builder: Any = torch._dynamo.variables.builder
    for cls in _CLASSES:
        builder.VariableBuilder._type_dispatch().pop(cls, None)
        builder.SourcelessBuilder._type_handlers.pop(cls, None)


_CLASSES = (EntryPoint, LastResort)


def patches() -> list[Patch]:
    """Return the patches of Dynamo, once it is imported."""
    dynamo: Any = torch._dynamo
    modes = require(dynamo.variables, "torch_function")
    return [
        ReplacedItem(names_in_guards(), "___get_torch_function_mode_stack_at", _mode_at),
        replaced_function(dynamo.convert_frame, "trace_frame", _trace_frame),
        replaced_function(require(modes, "SymbolicTorchFunctionState"), "__init__", _see_mode),
        *(Replaced(module, "get_torch_function_mode_stack_at", _mode_at) for module in (dynamo.utils, dynamo.guards)),
        replaced_function(dynamo.utils, "set_torch_function_mode_stack", _set_stack),
        Replaced(torch.utils._device, "CURRENT_DEVICE", _DefaultDevice),
        Replaced(require(dynamo.guards, "GuardBuilder"), "DEFAULT_DEVICE", _guard_default_device),
        Callback(_show_originals, _show_nothing),
    ]
