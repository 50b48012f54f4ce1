"""Storages, whose constructors the mode does not see, for ``torch/storage.py``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from torchdevice.core import Context, per_context, replaces, thread_state


@replaces(torch.TypedStorage, "__init__")
@replaces(torch, "range")
def with_device(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a constructor with its keyword argument ``device`` rewritten, and pin only where the target pins."""
    device = kwargs.get("device")
    if device is not None:
        kwargs["device"] = context.redirect(device) or device
    if kwargs.get("pin_memory") and not context.runtime.pins_memory:
        kwargs["pin_memory"] = False
    return original(*args, **kwargs)


@replaces(torch.UntypedStorage, "__new__")
def _untyped_storage(context: Context, original: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """``torch.UntypedStorage.__new__``: rewrite the device, and let the runtime make storages of the target."""
    if device is None:
        return original(*args, **kwargs)
    device = context.redirect(device) or (device if isinstance(device, torch.device) else torch.device(device))
    if device.type == context.device_type:
        return context.runtime.new_storage(original, *args, device=device, **kwargs)
    return original(*args, device=device, **kwargs)


@replaces(torch.storage, "_get_device_from_module")
def _device_of_module(context: Context, original: Any, module: str) -> str:
    """``_get_device_from_module``: return the target for the module of types such as ``torch.cuda.FloatStorage``."""
    found = original(module)
    device = context.redirect(found)
    if context.shown_as is not None or device is None:
        return found
    return str(device) if device.index else device.type  # torch compares it with the type of a storage's device


_NEEDS_TARGET = frozenset(
    {
        "torch.multiprocessing.reductions",  # chooses how to share the memory
        "torch.serialization",  # chooses the tag in a file
        "torchdevice.torch_apis.serialization",
    }
)
"""Modules that need the device of a storage itself, not the one that the program is shown."""


def _read_device(context: Context, original: Any, storage: Any) -> torch.device:
    """``UntypedStorage.device``: under ``identity="program"`` the program's device, as ``Tensor.device`` answers."""
    device = original(storage)
    if context.shown_as is None or device.type != context.device_type or not rewrites_calls():
        return device
    caller = sys._getframe(2).f_globals.get("__name__")  # frame 1 is the function that per_context() made
    return device if caller in _NEEDS_TARGET else context.shown(device)


def rewrites_calls() -> bool:
    """Return whether torch calls of this thread are rewritten now.

    They are not while the mode handles a call. Then torch itself works on the target and needs the target's device.
    """
    stack = _get_current_function_mode_stack()
    return thread_state.state.mode is not None or any(isinstance(mode, thread_state.ContextMode) for mode in stack)


@replaces(torch.UntypedStorage, "device", makes=True)
def _device_property(original: Any) -> property:
    return property(per_context(original.__get__, _read_device))
