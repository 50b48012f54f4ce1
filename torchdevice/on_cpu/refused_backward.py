"""Kernels of backward operators that refuse a call, which then runs on the CPU.

In ``backward`` autograd calls operators from C++, where no torch function is called again. So the operators that only
``backward`` calls get a kernel that calls torch's and looks at its error. Other operators cost nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.on_cpu.missing_operators import VARIABLE, overload
from torchdevice.on_cpu.operators import run
from torchdevice.on_cpu.registrations import Registrations
from torchdevice.patching import Callback, Installation
from torchdevice.torch_internals import require

_REFUSALS = (RuntimeError, TypeError)
"""The types of a refusal; ``NotImplementedError`` is one of the first."""

_names = require(torch._C, "_dispatch_get_all_op_names")
_has_kernel = require(torch._C, "_dispatch_has_kernel_for_dispatch_key")


def is_refusal(context: Context, error: BaseException) -> bool:
    """Return whether the target's kernel refused a call that may run on the CPU.

    It may not in a strict scope, where the program has switched that off, and for a program that is written for the
    target, where this package does nothing.
    """
    native = context.runtime.location_tag == context.options.written_for
    off = context.options.strict or native or os.environ.get(VARIABLE) == "0"
    return not off and context.runtime.refuses(error)


def operators(key: str) -> list[str]:
    """Return the operators of ATen that only ``backward`` calls and that have a kernel under a dispatch key."""
    return [name for name in _names() if is_of_backward(name) and _has_kernel(name, key)]


def is_of_backward(name: str) -> bool:
    """Return whether an operator, by its name with namespace and overload, is one that only ``backward`` calls."""
    namespace, _, operator = name.partition("::")
    return namespace == "aten" and operator.partition(".")[0].endswith("_backward")


def kernels(key: str) -> Mapping[str, Callable[..., Any]]:
    """Return a kernel for each of :func:`operators`."""
    return {name: _kernel(name, key) for name in operators(key)}


def _kernel(name: str, key: str) -> Callable[..., Any]:
    original = require(torch.library, "get_kernel")(name, key)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original.call_boxed(keys, *args, **kwargs)
        except _REFUSALS as error:
            context = thread_state.state.context
            if context is None or not is_refusal(context, error):
                raise
        return run(name, overload(name), args, kwargs, context.device_type)

    return kernel


@functools.cache
def installation(key: str) -> Installation:
    """Return the installation of the kernels under a dispatch key."""
    registrations = Registrations(key, lambda: kernels(key))
    return Installation(lambda: [Callback(registrations.install, registrations.remove)])


def needed(context: Context) -> list[Installation]:
    """Return the installations that a context needs for its target."""
    key = context.runtime.refusing_key
    return [installation(key)] if key is not None and not context.options.strict else []
