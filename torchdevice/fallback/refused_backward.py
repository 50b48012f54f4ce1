"""Kernels of operators that refuse a call in ``backward``, which then runs on the CPU.

In ``backward`` autograd calls operators from C++, where no torch function is called again. So some operators get a
kernel that calls torch's and looks at its error: those that only ``backward`` calls, and those of formulas of
derivatives that take much longer than the microsecond of a frame of Python. Other operators cost nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdevice.core import thread_state
from torchdevice.core.context import Context
from torchdevice.core.patching import Installation
from torchdevice.fallback.cpu_fallback import run
from torchdevice.fallback.kernel_registration import installation
from torchdevice.fallback.missing_operators import VARIABLE, overload
from torchdevice.foundation import data_files

_NONE = -1
"""What torch answers instead of a number where no ``backward`` runs."""

_REFUSALS = (RuntimeError, TypeError)
"""The types of a refusal; ``NotImplementedError`` is one of the first."""

_COSTLY = frozenset(data_files.read(__file__, "costly_operators.json"))
"""Operators that formulas of derivatives call and that take long, without the ``_`` of those in place."""

_names = torch._C._dispatch_get_all_op_names
_schema = torch._C._get_schema
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_backward_that_runs = torch._C._current_graph_task_id


def is_refusal(context: Context, error: BaseException) -> bool:
    """Return whether the target's kernel refused a call that may run on the CPU.

    It may not in a strict scope, where the program has switched that off, and for a program that is written for the
    target, where this package does nothing.
    """
    native = context.runtime.location_tag == context.program
    off = context.options.strict or native or os.environ.get(VARIABLE) == "0"
    return not off and context.runtime.refuses(error)


def operators(key: str) -> list[str]:
    """Return the operators of ATen that get a kernel of their own, of those with a kernel under a dispatch key."""
    return [name for name in _names() if _is_wrapped(name) and _has_kernel(name, key) and not _writes_to_given(name)]


def _is_wrapped(name: str) -> bool:
    """Return whether only ``backward`` calls an operator, or a frame of Python is a small part of its time."""
    namespace, _, operator = name.partition("::")
    packet = operator.partition(".")[0]
    return namespace == "aten" and ("_backward" in packet or not _COSTLY.isdisjoint((packet, packet.removesuffix("_"))))


@functools.cache
def _writes_to_given(name: str) -> bool:
    """Return whether an operator writes to tensors that are given for its results. Autograd calls no such overload."""
    packet, _, variant = name.partition(".")
    arguments = _schema(packet, variant).arguments  # without making the operator, which takes longer
    return any(argument.kwarg_only and argument.alias_info is not None for argument in arguments)


def kernels(key: str) -> Mapping[str, Callable[..., Any]]:
    """Return a kernel for each of :func:`operators`."""
    return {name: _kernel(name, key) for name in operators(key)}


def _kernel(name: str, key: str) -> Callable[..., Any]:
    original = torch.library.get_kernel(name, key)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original.call_boxed(keys, *args, **kwargs)
        except _REFUSALS as error:
            context = thread_state.state.context
            # Elsewhere the torch call is made again above autograd, so that its backward runs on the CPU too.
            if context is None or _backward_that_runs() == _NONE or not is_refusal(context, error):
                raise
        return run(name, overload(name), args, kwargs, context.device_type)

    return kernel


def needed(context: Context) -> list[Installation]:
    """Return the installations that a context needs for its target."""
    key = context.runtime.refusing_key
    return [installation(kernels, key)] if key is not None and not context.options.strict else []
