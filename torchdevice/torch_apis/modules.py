"""Moves and copies of modules, and the fast paths of attention, for ``torch/nn``."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchdevice.core import thread_state
from torchdevice.core.context import Context
from torchdevice.core.patching import Patch, ReplacedInImporters, replaced_function
from torchdevice.engines import moves
from torchdevice.engines.wrap import EntryPoint


def _apply(context: Context, original: Any, self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """``Module._apply``, by which a module moves its parameters and buffers.

    Where a move may have nothing to do, a parameter keeps its memory if nothing else holds that memory
    (:mod:`torchdevice.engines.moves`).
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
    return moves.followed(self, result) if context.runtime.shares_host_memory else result


class _HasTorchFunction(EntryPoint):
    """``torch.overrides.has_torch_function``, by which attention and encoders choose whether they take a fast path.

    It is True where any mode is on torch's stack, and the scope's is none of the program's. The paths differ in more
    than time: after the fast one an encoder's results are 0 at padded places, and only it takes nested tensors.
    Modules that import it by value, such as ``torch.nn.functional``, hand calls over to the scope's mode by it.
    """

    def __call__(self, /, relevant_args: Any) -> bool:
        answer: bool = self.original(relevant_args)
        if not answer or "has_torch_function" in sys._getframe(1).f_globals:
            return answer
        only_ours = all(isinstance(mode, thread_state.ContextMode) for mode in thread_state.stacked_modes())
        return not only_ours or any(map(_overrides, relevant_args))


def _overrides(value: Any) -> bool:
    """Return whether torch hands calls with a value over to the value's class."""
    kind = type(value)
    return kind is not torch.Tensor and getattr(kind, "__torch_function__", _DISABLED) is not _DISABLED


_DISABLED = torch._C._disabled_torch_function_impl


def patches() -> list[Patch]:
    """Return the patches of modules and their parameters."""
    return [
        ReplacedInImporters(torch.overrides, "has_torch_function", _HasTorchFunction),
        replaced_function(torch.nn.Module, "_apply", _apply),
        replaced_function(torch.nn.Parameter, "__deepcopy__", _deepcopy),
    ]
