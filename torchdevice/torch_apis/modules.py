"""Moves of whole modules, which keep memory that nobody but the module holds. For ``torch/nn/modules/module.py``."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.patching import Patch, replaced_function


def _apply(context: Context, original: Any, self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """``Module._apply``, by which a module moves its parameters and buffers (see :mod:`torchdevice.placement`)."""
    if not context.runtime.shares_host_memory:
        return original(self, *args, **kwargs)
    context.thread.moving_module += 1
    try:
        return original(self, *args, **kwargs)
    finally:
        context.thread.moving_module -= 1


def patches() -> list[Patch]:
    """Return the patch of ``Module._apply``."""
    return [replaced_function(torch.nn.Module, "_apply", _apply)]
