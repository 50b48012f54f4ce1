"""Constructors whose device torch does not show to the mode.

Storages, nested tensors and ``torch.range`` are no torch functions. A device context (``with torch.device("cuda")``,
``set_default_device``) that was there before the scope lies below the mode, and adds its device after the mode has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from torchdevice._patching import Patch, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _with_device(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is not None:
        kwargs["device"] = scope.redirect(device) or device
    if kwargs.get("pin_memory") and not scope.runtime.pins_memory:
        kwargs["pin_memory"] = False
    return original(*args, **kwargs)


def _untyped_storage(scope: Scope, original: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """``torch.UntypedStorage.__new__``: on the target as its runtime makes one."""
    if device is None:
        return original(*args, **kwargs)
    device = scope.redirect(device) or torch.device(device)
    if device.type == scope.runtime.kind:
        return scope.runtime.new_storage(original, *args, device=device, **kwargs)
    return original(*args, device=device, **kwargs)


def _inject(scope: Scope, original: Any, self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """``DeviceContext.__torch_function__``: what it adds is rewritten too."""
    kwargs = kwargs or {}
    if kwargs.get("device") is None and func in _device_constructors():
        kwargs["device"] = scope.redirect(self.device) or self.device
    return original(self, func, types, args, kwargs)


def _device_of_module(scope: Scope, original: Any, module: str) -> str:
    """The device of ``torch.cuda.FloatStorage`` and its like, found from the name of their module."""
    found = original(module)
    return str(scope.redirect(found) or found)


def patches() -> list[Patch]:
    """Return the patches of these constructors."""
    return [
        replaced_function(torch.UntypedStorage, "__new__", _untyped_storage),
        replaced_function(torch.TypedStorage, "__init__", _with_device),
        replaced_function(torch.storage, "_get_device_from_module", _device_of_module),
        replaced_function(DeviceContext, "__torch_function__", _inject),
        replaced_function(torch, "range", _with_device),
        replaced_function(torch.nested, "nested_tensor", _with_device),
        replaced_function(torch.nested, "as_nested_tensor", _with_device),
    ]
