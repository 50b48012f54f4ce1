"""``torch.Generator(device="cuda")``: what it makes are plain generators of torch's own class."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice import thread_state
from torchdevice.patching import Patch, Replaced, subclass_in_place_of

_Original = torch.Generator


def _new(cls: type, device: Any = "cpu") -> torch.Generator:
    context = thread_state.state.context
    if context is not None:
        device = context.redirect(device) or torch.device(device)
        if device.type == context.device_type:
            return context.runtime.generator(device.index or 0, _Original if cls is Generator else cls)
    return _Original(device) if cls is Generator else _Original.__new__(cls, device)  # type: ignore[call-arg]


Generator = subclass_in_place_of(_Original, _new)


def patches() -> list[Patch]:
    """Return the patch of ``torch.Generator``."""
    return [Replaced(torch, "Generator", lambda _: Generator)]
