"""Where autograd calls Python: the engine, and the hooks that pack saved tensors.

torch takes the mode off the stack while it handles a torch function. ``Tensor.backward`` is one, and so is the operator
that saves a tensor. So custom ``Function.backward``, hooks, checkpoint recomputation and packing would run without the
mode; it is put back around them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack

from torchdevice._mode import DeviceMode
from torchdevice._patching import Patch, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _with_mode(scope: Scope, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the mode on the stack."""
    if any(isinstance(mode, DeviceMode) for mode in _get_current_function_mode_stack()):
        return function(*args, **kwargs)
    with DeviceMode(scope):
        return function(*args, **kwargs)


def _init_hooks(scope: Scope, original: Any, self: Any, pack_hook: Any, unpack_hook: Any) -> None:
    """``saved_tensors_hooks``: let both hooks see the mode."""
    original(self, functools.partial(_with_mode, scope, pack_hook), functools.partial(_with_mode, scope, unpack_hook))


def patches() -> list[Patch]:
    """Return the patches of the engine's two callers and of the hooks."""
    return [
        replaced_function(torch.autograd, "_engine_run_backward", _with_mode),
        replaced_function(torch.autograd.graph, "_engine_run_backward", _with_mode),
        replaced_function(torch.autograd.graph.saved_tensors_hooks, "__init__", _init_hooks),
    ]
