"""Factories that the mode does not see: nested tensors, ``torch.range``, device contexts, DLPack."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack
from torch.utils._device import DeviceContext, _device_constructors

from torchdevice import placement
from torchdevice.context import Context
from torchdevice.engines import rewriters
from torchdevice.patching import Patch, replaced_function
from torchdevice.torch_apis.storage import with_device


def _inject(
    context: Context, original: Any, self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """``DeviceContext.__torch_function__``: rewrite the device that it adds to a call."""
    kwargs = kwargs or {}
    if kwargs.get("device") is not None or func not in _device_constructors():
        return original(self, func, types, args, kwargs)
    kwargs = {**kwargs, "device": context.redirect(self.device) or self.device}
    rewriter = rewriters.rewriter_of(rewriters.table_of(context), func)
    if rewriter is None or not context.runtime.shares_host_memory:
        return original(self, func, types, args, kwargs)
    return rewriter(context, func, args, kwargs)  # the mode does not see this call, and a move may have to copy


def _from_dlpack(context: Context, original: Any, ext_tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``from_dlpack``: mark the new storage with the side of the source, whose memory it shares."""
    result = original(ext_tensor, *args, **kwargs)
    return placement.shared(ext_tensor, result) if context.runtime.shares_host_memory else result


def patches() -> list[Patch]:
    """Return the patches of these factories."""
    return [
        replaced_function(DeviceContext, "__torch_function__", _inject),
        replaced_function(torch, "range", with_device),
        replaced_function(torch.nested, "nested_tensor", with_device),
        replaced_function(torch.nested, "as_nested_tensor", with_device),
        replaced_function(torch, "from_dlpack", _from_dlpack),
        replaced_function(torch.utils.dlpack, "from_dlpack", _from_dlpack),
    ]
