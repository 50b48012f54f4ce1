"""Puts the mode back while the autograd engine runs Python code of the program.

torch takes the mode off the stack while it handles a torch function, such as ``Tensor.backward`` or an operator that
saves a tensor. Without these patches the mode would not see the torch calls of custom ``Function.backward`` methods,
hooks, checkpoint recomputation and hooks that pack saved tensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.engines.mode import with_mode
from torchdevice.patching import Patch, replaced_function


def _init_hooks(context: Context, original: Any, self: Any, pack_hook: Any, unpack_hook: Any) -> None:
    """``saved_tensors_hooks``: put the mode back while either hook runs."""
    original(self, functools.partial(with_mode, context, pack_hook), functools.partial(with_mode, context, unpack_hook))


def patches() -> list[Patch]:
    """Return the patches of the engine's two callers and of ``saved_tensors_hooks``."""
    return [
        replaced_function(torch.autograd, "_engine_run_backward", with_mode),
        replaced_function(torch.autograd.graph, "_engine_run_backward", with_mode),
        replaced_function(torch.autograd.graph.saved_tensors_hooks, "__init__", _init_hooks),
    ]
