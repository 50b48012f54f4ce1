"""Optimizers with ``capturable=True``, which torch allows on a list of devices. For ``torch/optim``."""

from __future__ import annotations

import importlib
from typing import Any

from torchdevice.core.context import Context
from torchdevice.core.patching import Patch, replaced_in_importers


def _capturable_devices(context: Context, original: Any, supports_xla: bool = True) -> list[str]:
    """Return torch's list of device types for ``capturable=True``, with the target's added."""
    return [*original(supports_xla), context.device_type, context.family]


def patches() -> list[Patch]:
    """Return the patch of the function in each module of ``torch.optim`` that has imported it."""
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes it as an attribute
    name = "_get_capturable_supported_devices"
    return [replaced_in_importers(optimizer, name, _capturable_devices, native_to="cuda")]
