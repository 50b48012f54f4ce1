"""``torch.load`` of storages tagged cuda, mps or xpu.

``torch.serialization.register_package`` is torch's public way in. The entry is taken out again with the last context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import serialization

from torchdevice import thread_state
from torchdevice.patching import Callback, Patch
from torchdevice.spelling import parse
from torchdevice.torch_internals import require

_PRIORITY = 5  # before torch's own: cpu 10, cuda 20


def _tag(storage: Any) -> str | None:
    """Tag what is saved with the device it is on, a simulated one's with the one it simulates, for other machines."""
    context = thread_state.current()
    if (
        context is None
        or context.runtime.location_tag == context.device_type
        or storage.device.type != context.device_type
    ):
        return None
    return f"{context.runtime.location_tag}:{storage.device.index}"


def _deserialize(storage: Any, location: str) -> Any:
    """Return the storage on the device that stands in for its tag, or None to let torch go on."""
    context = thread_state.current()
    if context is None:
        return None
    if parse(location) is not None:
        device = context.redirect(location)
    else:  # perhaps a device that is rewritten already
        rewritten = location.partition(":")[0] == context.device_type and not context.runtime.shares_host_memory
        device = torch.device(location) if rewritten else None
    return None if device is None else storage.to(device=device)


def _register() -> None:
    serialization.register_package(_PRIORITY, _tag, _deserialize)


def _unregister() -> None:
    registry = require(serialization, "_package_registry")
    registry[:] = [entry for entry in registry if entry[2] is not _deserialize]


def patches() -> list[Patch]:
    """Return the patch of torch's registry of storage locations."""
    assert torch.serialization is serialization
    return [Callback(_register, _unregister)]
