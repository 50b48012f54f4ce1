"""Where torch calls the program's Python while it handles a torch function: the mode is off there, and is put back.

torch takes the mode off the stack while it handles a torch function. ``Tensor.backward`` is one, and so is the operator
that saves a tensor or whose kernel is Python. Without this, custom ``Function.backward``, hooks, checkpoint
recomputation, hooks that pack saved tensors and the kernels of custom operators would not see it.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from torchdevice._mode import DeviceMode, of_this_thread
from torchdevice._patching import Patch, per_scope, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _with_mode(scope: Scope, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with a mode that sees what it does: on the stack, unless there is one beside it."""
    if of_this_thread() is not None:
        return function(*args, **kwargs)
    with DeviceMode(scope):
        return function(*args, **kwargs)


def _init_hooks(scope: Scope, original: Any, self: Any, pack_hook: Any, unpack_hook: Any) -> None:
    """``saved_tensors_hooks``: let both hooks see the mode."""
    original(self, functools.partial(_with_mode, scope, pack_hook), functools.partial(_with_mode, scope, unpack_hook))


def _impl(scope: Scope, original: Any, self: Any, op_name: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """``Library.impl``: let the program's own kernel see the mode of whatever scope it is called in."""
    return original(self, op_name, _kernel(fn), *args, **kwargs)


def _init_custom_op(
    scope: Scope, original: Any, self: Any, namespace: str, name: str, schema: str, fn: Any, *args: Any, **kwargs: Any
) -> None:
    """``torch.library.custom_op``: the same for its function."""
    original(self, namespace, name, schema, _kernel(fn), *args, **kwargs)


def _register_kernel(scope: Scope, original: Any, self: Any, device_types: Any, fn: Any = None, /) -> Any:
    """``CustomOpDef.register_kernel``: the same for its function. A kernel for CUDA is not taken for the target's."""
    if fn is None:
        return functools.partial(_register_kernel, scope, original, self, device_types)
    original(self, device_types, _kernel(fn))
    return fn


def _kernel(fn: Any) -> Any:
    """Return a kernel of the program's that sees the mode; torch's own are left as they are."""
    own = isinstance(fn, types.FunctionType) and not fn.__module__.startswith("torch.")
    return per_scope(fn, _with_mode) if own else fn


def patches() -> list[Patch]:
    """Return the patches of the engine's two callers, of the hooks and of the registration of kernels."""
    return [
        replaced_function(torch.autograd, "_engine_run_backward", _with_mode),
        replaced_function(torch.autograd.graph, "_engine_run_backward", _with_mode),
        replaced_function(torch.autograd.graph.saved_tensors_hooks, "__init__", _init_hooks),
        replaced_function(torch.library.Library, "impl", _impl),
        replaced_function(torch._library.custom_ops.CustomOpDef, "__init__", _init_custom_op),
        replaced_function(torch._library.custom_ops.CustomOpDef, "register_kernel", _register_kernel),
    ]
