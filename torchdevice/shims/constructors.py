"""Constructors with a device argument that torch does not show to modes: storages, nested tensors, ``torch.range``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from torchdevice import _active
from torchdevice._patching import Patch, Replaced, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _with_device(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is not None:
        kwargs["device"] = scope.redirect(device) or device
    if kwargs.get("pin_memory") and not scope.runtime.pins_memory:
        kwargs["pin_memory"] = False
    return original(*args, **kwargs)


def _new(original: Any) -> Any:
    @functools.wraps(original)
    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        scope = _active.state.scope
        return original(cls, *args, **kwargs) if scope is None else _with_device(scope, original, cls, *args, **kwargs)

    return __new__


def _device_of_module(scope: Scope, original: Any, module: str) -> str:
    """The device of ``torch.cuda.FloatStorage`` and its like, found from the name of their module."""
    found = original(module)
    return str(scope.redirect(found) or found)


def patches() -> list[Patch]:
    """Return the patches of these constructors."""
    return [
        Replaced(torch.UntypedStorage, "__new__", _new),
        replaced_function(torch.TypedStorage, "__init__", _typed_storage),
        replaced_function(torch.storage, "_get_device_from_module", _device_of_module),
        replaced_function(torch, "range", _with_device),
        replaced_function(torch.nested, "nested_tensor", _with_device),
        replaced_function(torch.nested, "as_nested_tensor", _with_device),
    ]


def _typed_storage(scope: Scope, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    _with_device(scope, original, self, *args, **kwargs)
