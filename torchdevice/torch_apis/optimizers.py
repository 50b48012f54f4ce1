"""Optimizers, for ``torch/optim`` and ``torch/utils/_foreach_utils.py``.

torch allows ``capturable=True`` on a list of devices. It groups tensors by devices, which it reads in C++.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.utils._foreach_utils

from torchdevice.core.bindings import replaces
from torchdevice.core.context import Context
from torchdevice.torch_apis.storage import rewrites_calls

_OPTIMIZER = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes it as an attribute


@replaces(_OPTIMIZER, "_get_capturable_supported_devices", native_to="cuda", by_value=True)
def _capturable_devices(context: Context, original: Any, supports_xla: bool = True) -> list[str]:
    """Return torch's list of device types for ``capturable=True``, with the target's added."""
    return [*original(supports_xla), context.device_type, context.family]


@replaces(torch.utils._foreach_utils, "_group_tensors_by_device_and_dtype", by_value=True)
def _groups(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return tensors in groups, with the devices that the tensors report."""
    found = original(*args, **kwargs)
    if context.shown_as is None or not rewrites_calls():
        return found
    return {(context.shown(device), dtype): group for (device, dtype), group in found.items()}
