"""Optimizers, for ``torch/optim`` and ``torch/utils/_foreach_utils.py``.

torch allows ``capturable=True`` on a list of devices. It groups tensors by devices, which it reads in C++.
"""

from __future__ import annotations

import importlib
from typing import Any

from torchdevice.core.context import Context
from torchdevice.core.patching import Patch, replaced_in_importers
from torchdevice.torch_apis.storage import rewrites_calls


def _capturable_devices(context: Context, original: Any, supports_xla: bool = True) -> list[str]:
    """Return torch's list of device types for ``capturable=True``, with the target's added."""
    return [*original(supports_xla), context.device_type, context.family]


def _groups(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return tensors in groups, with the devices that the tensors report."""
    found = original(*args, **kwargs)
    if context.shown_as is None or not rewrites_calls():
        return found
    return {(context.shown(device), dtype): group for (device, dtype), group in found.items()}


def patches() -> list[Patch]:
    """Return the patches of the functions in each module that has imported them."""
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes it as an attribute
    capturable, groups = "_get_capturable_supported_devices", "_group_tensors_by_device_and_dtype"
    return [
        replaced_in_importers(optimizer, capturable, _capturable_devices, native_to="cuda"),
        replaced_in_importers(importlib.import_module("torch.utils._foreach_utils"), groups, _groups),
    ]
