"""Storages, whose constructors are not torch functions. For ``torch/storage.py``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.patching import Patch, Replaced, per_context, replaced_function


def with_device(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is not None:
        kwargs["device"] = context.redirect(device) or device
    if kwargs.get("pin_memory") and not context.runtime.pins_memory:
        kwargs["pin_memory"] = False
    return original(*args, **kwargs)


def _untyped_storage(context: Context, original: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """``torch.UntypedStorage.__new__``: on the target as its runtime makes one."""
    if device is None:
        return original(*args, **kwargs)
    device = context.redirect(device) or torch.device(device)
    if device.type == context.device_type:
        return context.runtime.new_storage(original, *args, device=device, **kwargs)
    return original(*args, device=device, **kwargs)


def _device_of_module(context: Context, original: Any, module: str) -> str:
    """The device of ``torch.cuda.FloatStorage`` and its like, found from the name of their module."""
    found = original(module)
    device = context.redirect(found)
    if context.says_program or device is None:
        return found
    return str(device) if device.index else device.type  # torch compares it with the type of a storage's device


_TOLD_THE_TRUTH = frozenset(
    {
        "torch.multiprocessing.reductions",  # chooses how to share the memory
        "torch.serialization",  # names it for other machines
        "torchdevice.torch_apis.serialization",
    }
)
"""Modules that work on storages for the program."""


def _read_device(context: Context, original: Any, storage: Any) -> torch.device:
    """``UntypedStorage.device``: as the tensors of the scope say it, wherever they say it."""
    device = original(storage)
    if not context.says_program or device.type != context.device_type or not _rewrites_calls():
        return device
    caller = sys._getframe(2).f_globals.get("__name__")  # behind the function that asked for the context
    return device if caller in _TOLD_THE_TRUTH else context.program_device(device.index or 0)


def _rewrites_calls() -> bool:
    """Return whether a torch call of this thread is rewritten now. Within one, torch works on the target itself."""
    stack = _get_current_function_mode_stack()
    return thread_state.state.mode is not None or any(isinstance(mode, thread_state.ContextMode) for mode in stack)


def _device_property(original: Any) -> property:
    def device(storage: Any) -> torch.device:
        return original.__get__(storage)

    return property(per_context(device, _read_device))


def patches() -> list[Patch]:
    """Return the patches of storages."""
    return [
        replaced_function(torch.UntypedStorage, "__new__", _untyped_storage),
        replaced_function(torch.TypedStorage, "__init__", with_device),
        replaced_function(torch.storage, "_get_device_from_module", _device_of_module),
        Replaced(torch.UntypedStorage, "device", _device_property),
    ]
