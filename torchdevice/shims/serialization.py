"""``torch.load`` of storages tagged cuda, mps or xpu.

``torch.serialization.register_package`` is torch's public way in. The entry is taken out again with the last scope.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import serialization

from torchdevice import _active
from torchdevice._patching import Callback, Patch
from torchdevice._private import require
from torchdevice._spelling import parse

_PRIORITY = 5  # before torch's own: cpu 10, cuda 20


def _tag(storage: Any) -> str | None:
    """Tag what is saved with the device it is on, a simulated one's with the one it simulates, for other machines."""
    scope = _active.current()
    if scope is None or scope.runtime.family == scope.runtime.kind or storage.device.type != scope.runtime.kind:
        return None
    return f"{scope.runtime.family}:{storage.device.index}"


def _deserialize(storage: Any, location: str) -> Any:
    """Return the storage on the device that stands in for its tag, or None to let torch go on."""
    scope = _active.current()
    if scope is None:
        return None
    if parse(location) is not None:
        device = scope.redirect(location)
    else:  # perhaps a device that is rewritten already
        rewritten = location.partition(":")[0] == scope.runtime.kind and not scope.runtime.shares_host_memory
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
