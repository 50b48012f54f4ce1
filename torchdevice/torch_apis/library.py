"""Puts the mode back while torch runs the program's own kernels of operators, for ``torch/library.py``."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from torchdevice.core.context import Context
from torchdevice.core.patching import Patch, per_context, replaced_function
from torchdevice.engines.mode import with_mode
from torchdevice.foundation.torch_internals import require


def _impl(context: Context, original: Any, self: Any, op_name: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """``Library.impl``: register a kernel that runs with the mode of the scope in which it is called."""
    return original(self, op_name, _kernel(fn), *args, **kwargs)


def _register_kernel(context: Context, original: Any, self: Any, device_types: Any, fn: Any = None, /) -> Any:
    """``CustomOpDef.register_kernel``: register a kernel that runs with the mode.

    The kernel stays registered for the device types that the program names: one for CUDA does not run on the target.
    """
    if fn is None:
        return functools.partial(_register_kernel, context, original, self, device_types)
    kernel = _kernel(fn)
    if require(self, "_init_fn") is fn:  # what runs where the kernel is switched off
        self._init_fn = kernel
    original(self, device_types, kernel)
    return fn


def _kernel(fn: Any) -> Any:
    """Return a function that runs a kernel of the program with the mode. A kernel of torch is returned unchanged."""
    own = isinstance(fn, types.FunctionType) and not (fn.__module__ or "").startswith("torch.")
    return per_context(fn, with_mode) if own else fn


def patches() -> list[Patch]:
    """Return the patches of the functions that register kernels."""
    return [
        replaced_function(torch.library.Library, "impl", _impl),
        replaced_function(torch._library.custom_ops.CustomOpDef, "register_kernel", _register_kernel),
    ]
