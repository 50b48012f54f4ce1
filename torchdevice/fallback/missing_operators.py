"""Operators without a kernel for the target, which run on the CPU while a scope is active.

A kernel is registered for each of them under the target's dispatch key, so operators that the target has cost nothing.
torch allows one fallback for a whole key, and its MPS build has one: it raises, or with
``PYTORCH_ENABLE_MPS_FALLBACK=1`` runs the operator on the CPU. Therefore operators are registered one by one.
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
from torchdevice.foundation.torch_texts import text

VARIABLE = "PYTORCH_ENABLE_MPS_FALLBACK"
"""torch's own switch. A program's setting is respected: ``0`` leaves torch's error, ``1`` torch's own fallback."""

_COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

_LEFT_OUT = frozenset({"c10d"})
"""Namespaces whose operators talk to other processes, by the device of their tensors."""

_names = torch._C._dispatch_get_all_op_names
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def error_text(operator: str) -> str:
    """Return the text of torch's error for an operator without a kernel (aten/src/ATen/mps/MPSFallback.mm)."""
    return text("missing on MPS", operator=operator, commit=torch.version.git_version)


def run_on_cpu(context: Context | None, name: str, op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that the target lacks on the CPU, for a context that allows it.

    Raises:
        NotImplementedError: There is no context, or it is strict. The text is torch's.
    """
    if context is None or context.options.strict:
        raise NotImplementedError(error_text(name))
    return run(name, op, args, kwargs, context.runtime.device_type)


def lacking(key: str, lacks: Callable[[str], bool] | None = None) -> list[str]:
    """Return the operators that have a kernel for the CPU and none for a dispatch key, and are not composed.

    Args:
        key: The dispatch key.
        lacks: Says of an operator, instead of torch's registrations for the key, whether it has no kernel.
    """
    return _lacking(key, lacks, len(_names()))


@functools.cache
def _lacking(key: str, lacks: Callable[[str], bool] | None, number_of_operators: int) -> list[str]:
    return [
        name
        for name in _names()
        if name.partition("::")[0] not in _LEFT_OUT
        and _has_kernel(name, "CPU")
        and (lacks(name) if lacks is not None else not any(_has_kernel(name, each) for each in (key, *_COMPOSITE)))
    ]


def kernel_of(name: str, key: str | None = None, otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the kernel that runs an operator on the CPU.

    Args:
        name: The operator, with namespace and overload.
        key: The dispatch key of devices that lack it.
        otherwise: Runs the operator for scopes on devices that share the key and do not lack it.
    """

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        context = thread_state.state.context
        if otherwise is not None and (context is None or context.runtime.missing_operators_key != key):
            return otherwise(overload(name), *args, **kwargs)
        return run_on_cpu(context, name, overload(name), args, kwargs)

    return kernel


@functools.cache
def overload(name: str) -> Any:
    """Return an operator by its name with namespace and overload."""
    namespace, _, operator = name.partition("::")
    packet, _, variant = operator.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant or "default")


def kernels(key: str, lacks: Any = None, otherwise: Any = None) -> Mapping[str, Callable[..., Any]]:
    """Return the kernels for a dispatch key, see :func:`lacking` and :func:`kernel_of`."""
    return {name: kernel_of(name, key, otherwise) for name in lacking(key, lacks)}


def needed(context: Context) -> list[Installation]:
    """Return the installations that a context needs, by its target and the program's setting of :data:`VARIABLE`."""
    runtime = context.runtime
    key = runtime.missing_operators_key
    if key is None or VARIABLE in os.environ:
        return []
    return [installation(kernels, key, runtime.lacks_kernel, runtime.run_for_others)]
