"""Where the autograd engine calls the program's Python while the mode is off, and the mode is put back.

Torch takes the mode off the stack while it handles a torch function. ``Tensor.backward`` is one, and so is an operator
that saves a tensor. Without this, custom ``Function.backward``, hooks, checkpoint recomputation, hooks that pack saved
tensors, and custom functions under ``torch.func`` would not see the mode.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.engines.mode import with_mode
from torchdevice.engines.rewriters import rewrites
from torchdevice.patching import Patch, replaced_function
from torchdevice.torch_internals import require

_STEPS = ("forward", "setup_context", "backward", "jvp", "vmap")
"""What a program writes in a custom function."""


def _init_hooks(context: Context, original: Any, self: Any, pack_hook: Any, unpack_hook: Any) -> None:
    """``saved_tensors_hooks``: let both hooks see the mode."""
    original(self, functools.partial(with_mode, context, pack_hook), functools.partial(with_mode, context, unpack_hook))


@rewrites(require(torch._functorch.autograd_function, "custom_function_call"))
def _transformed(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A custom function under ``torch.func``, which torch treats as a torch function whose Python it calls itself."""
    function, *operands = args
    steps = {
        name: staticmethod(functools.partial(with_mode, context, getattr(function, name)))
        for name in _STEPS
        if getattr(function, name) is not getattr(torch.autograd.Function, name)  # torch asks which are overridden
    }
    return func(type(function.__name__, (function,), steps), *operands, **kwargs)


def patches() -> list[Patch]:
    """Return the patches of the engine's two callers and of the hooks."""
    return [
        replaced_function(torch.autograd, "_engine_run_backward", with_mode),
        replaced_function(torch.autograd.graph, "_engine_run_backward", with_mode),
        replaced_function(torch.autograd.graph.saved_tensors_hooks, "__init__", _init_hooks),
    ]
