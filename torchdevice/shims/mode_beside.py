"""Dynamo and the engine without a mode on the stack.

Dynamo traces the modes that it finds on torch's stack, and guards on them. The thread's mode is shown to it as one more
mode while it traces, with a source of its own, so that compiled code runs without any mode on the stack. The wrapped
entry points are shown to it as what they stand for: the mode says what becomes of the call.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from torchdevice import _active
from torchdevice._entry_points import EntryPoint, LastResort
from torchdevice._patching import Callback, Patch, Replaced, ReplacedItem, replaced_function
from torchdevice._private import require

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_state = _active.state

_BESIDE = 1 << 20
"""The index that means the mode beside the stack to :func:`_mode_at`; Dynamo adds or subtracts a few."""


def _trace_frame(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Where Dynamo traces a frame: what it runs meanwhile, with fake tensors, asks no mode."""
    before = _state.mode, _state.traced
    _state.mode, _state.traced = None, _state.mode
    try:
        return original(*args, **kwargs)
    finally:
        _state.mode, _state.traced = before


def _see_mode(scope: Scope, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """What Dynamo knows of the modes where it begins to trace a frame: the one beside the stack is the topmost."""
    original(self, *args, **kwargs)
    if _state.traced is not None:
        source = torch._dynamo.source.TorchFunctionModeStackSource(_BESIDE)
        self.mode_stack.append(torch._dynamo.variables.lazy.LazyVariableTracker.create(_state.traced, source=source))


def _mode_at(original: Any) -> Any:
    """How guards and compiled code look a mode up."""

    @functools.wraps(original)
    def get_torch_function_mode_stack_at(ind: int) -> Any:
        return original(ind) if ind < _BESIDE // 2 else _state.mode or _state.traced

    return get_torch_function_mode_stack_at


def _set_stack(scope: Scope, original: Any, stack: list[Any]) -> None:
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
        Callback(_show_originals, _show_nothing),
    ]
