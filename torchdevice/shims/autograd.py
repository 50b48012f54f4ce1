"""The entry to the autograd engine.

``Tensor.backward`` is a torch function, and torch takes the mode off the stack while one is being handled. So custom
``Function.backward``, hooks and checkpoint recomputation would run without it; it is put back around the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack

from torchdevice._mode import DeviceMode
from torchdevice._patching import Patch, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _run_backward(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(mode, DeviceMode) for mode in _get_current_function_mode_stack()):
        return original(*args, **kwargs)
    with DeviceMode(scope):
        return original(*args, **kwargs)


def patches() -> list[Patch]:
    """Return the patches of the two modules that call the engine."""
    return [
        replaced_function(module, "_engine_run_backward", _run_backward)
        for module in (torch.autograd, torch.autograd.graph)
    ]
