"""Storages, whose constructors are not torch functions. For ``torch/storage.py``."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.patching import Patch, replaced_function


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
    return str(context.redirect(found) or found)


def patches() -> list[Patch]:
    """Return the patches of storages."""
    return [
        replaced_function(torch.UntypedStorage, "__new__", _untyped_storage),
        replaced_function(torch.TypedStorage, "__init__", with_device),
        replaced_function(torch.storage, "_get_device_from_module", _device_of_module),
    ]
