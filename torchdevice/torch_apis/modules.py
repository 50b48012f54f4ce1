"""Moves and copies of modules, for ``torch/nn``."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice import placement
from torchdevice.context import Context
from torchdevice.patching import Patch, replaced_function


def _apply(context: Context, original: Any, self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """``Module._apply``, by which a module moves its parameters and buffers.

    Where a move may have nothing to do, a parameter keeps its memory if nothing else holds that memory
    (:mod:`torchdevice.placement`).
    """
    if not (context.runtime.shares_host_memory or context.folds_devices):
        return original(self, *args, **kwargs)
    context.thread.moving_module += 1
    try:
        return original(self, *args, **kwargs)
    finally:
        context.thread.moving_module -= 1


def _deepcopy(context: Context, original: Any, self: torch.nn.Parameter, memo: Any) -> Any:
    """``Parameter.__deepcopy__``: mark the copy with the parameter's side, because a copy may never be moved itself."""
    result = original(self, memo)
    return placement.followed(self, result) if context.runtime.shares_host_memory else result


def patches() -> list[Patch]:
    """Return the patches of modules and their parameters."""
    return [
        replaced_function(torch.nn.Module, "_apply", _apply),
        replaced_function(torch.nn.Parameter, "__deepcopy__", _deepcopy),
    ]
