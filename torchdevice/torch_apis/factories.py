"""Factories whose device torch does not show to the mode: nested tensors, ``torch.range``, device contexts."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from torchdevice.context import Context
from torchdevice.patching import Patch, replaced_function
from torchdevice.torch_apis.storage import with_device


def _inject(
    context: Context, original: Any, self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """``DeviceContext.__torch_function__``: what it adds is rewritten too."""
    kwargs = kwargs or {}
    if kwargs.get("device") is None and func in _device_constructors():
        kwargs["device"] = context.redirect(self.device) or self.device
    return original(self, func, types, args, kwargs)


def patches() -> list[Patch]:
    """Return the patches of these factories."""
    return [
        replaced_function(DeviceContext, "__torch_function__", _inject),
        replaced_function(torch, "range", with_device),
        replaced_function(torch.nested, "nested_tensor", with_device),
        replaced_function(torch.nested, "as_nested_tensor", with_device),
    ]
