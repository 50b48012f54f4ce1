"""Operators without a kernel for the target, which run on the CPU while a scope is active.

A kernel is registered for each of them under the target's dispatch key, so operators that the target has cost nothing.
torch allows one fallback for a whole key, and its MPS build has one: it raises, or with
``PYTORCH_ENABLE_MPS_FALLBACK=1`` runs the operator on the CPU. Therefore operators are registered one by one.

So are operators whose kernels refuse a call in ``backward``. There autograd calls operators from C++, where no torch
function is called again. They get a kernel that calls torch's and looks at its error: those that only ``backward``
calls, and those of formulas of derivatives that take much longer than the microsecond of a frame of Python. Other
operators cost nothing.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchdevice.core import Context, Installation, thread_state
from torchdevice.fallback.cpu_fallback import run
from torchdevice.foundation import data_files
from torchdevice.foundation.torch_internals import registrations_for_dispatch_key
from torchdevice.foundation.torch_texts import text


@functools.cache
def installation(kernels: Callable[..., Mapping[str, Callable[..., Any]]], key: str, *more: Any) -> Installation:
    """Return what puts ``kernels(key, *more)`` in place under the dispatch key; one object for equal arguments."""
    registrations = Registrations(key, functools.partial(kernels, key, *more))
    return Installation(lambda: [registrations])


class Registrations:
    """Kernels of operators under one dispatch key.

    Args:
        key: The dispatch key.
        kernels: Returns the kernel of each operator, by its name with namespace and overload. Each is called with the
            call's dispatch keys and its arguments.
    """

    def __init__(self, key: str, kernels: Callable[[], Mapping[str, Callable[..., Any]]]):
        self._key = key
        self._kernels = kernels
        # Torch's own objects in C++: a `torch.library.Library` has a finalizer in Python, which would swallow what a
        # handler of a signal raises in it.
        self._libraries: dict[str, Any] = {}

    def install(self) -> None:
        """Register the kernels, once. May be called again."""
        self.remove()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*[Oo]verrid", UserWarning)
            for name, kernel in self._kernels().items():
                namespace, _, operator = name.partition("::")
                if namespace not in self._libraries:
                    self._libraries[namespace] = _make_library("IMPL", namespace, "", __file__, 0)
                self._libraries[namespace].impl(operator, self._key, kernel, True)  # with the dispatch keys of a call

    def remove(self) -> None:
        """Remove the kernels, so that those of torch are back. May be called again."""
        while self._libraries:
            # Taken out after it is destroyed: an interrupt in between makes the next call destroy it again.
            namespace, library = next(iter(self._libraries.items()))
            library.reset()
            self._libraries.pop(namespace, None)


_make_library = torch._C._dispatch_library

VARIABLE = "PYTORCH_ENABLE_MPS_FALLBACK"
"""torch's own switch. A program's setting is respected: ``0`` leaves torch's error, ``1`` torch's own fallback."""

COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

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
        and (lacks(name) if lacks is not None else not any(_has_kernel(name, each) for each in (key, *COMPOSITE)))
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
        if otherwise is not None and (context is None or context.runtime.corrected_key != key):
            return otherwise(overload(name), *args, **kwargs)
        return run_on_cpu(context, name, overload(name), args, kwargs)

    return kernel


@functools.cache
def overload(name: str) -> Any:
    """Return an operator by its name with namespace and overload."""
    namespace, _, operator = name.partition("::")
    packet, _, variant = operator.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), variant or "default")


def overload_of(name: str) -> Any:
    """Return an operator of ATen."""
    return overload(f"aten::{name}")


def schema_of(name: str) -> Any:
    """Return the schema of an operator by its name with namespace, without making the operator, which takes longer."""
    packet, _, variant = name.partition(".")
    return torch._C._get_schema(packet, variant)


@functools.cache
def composite() -> frozenset[str]:
    """Return the operators with a composite kernel, which torch runs before a fallback, by name with namespace."""
    return frozenset(name for key in COMPOSITE for name in registrations_for_dispatch_key(key))


def shadowed(key: str) -> set[str]:
    """Return the operators of ATen with a composite kernel and one for a dispatch key."""
    return of_aten(composite().intersection(registrations_for_dispatch_key(key)))


def of_aten(names: Iterable[str]) -> set[str]:
    """Return the operators of ATen among those with a namespace, without it."""
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def kernels(key: str, lacks: Any = None, otherwise: Any = None) -> Mapping[str, Callable[..., Any]]:
    """Return the kernels for a dispatch key, see :func:`lacking` and :func:`kernel_of`."""
    return {name: kernel_of(name, key, otherwise) for name in lacking(key, lacks)}


def needed(context: Context) -> list[Installation]:
    """Return the installations that a context needs, by its target and the program's setting of :data:`VARIABLE`."""
    runtime, found = context.runtime, []
    if runtime.corrected_key is not None and VARIABLE not in os.environ:
        found.append(installation(kernels, runtime.corrected_key, runtime.lacks_kernel, runtime.run_for_others))
    if runtime.refusing_key is not None and not context.options.strict:
        found.append(installation(refusing_kernels, runtime.refusing_key))
    return found


# ---- refusals in backward --------------------------------------------------------------------------------------------

_NONE = -1
"""What torch answers instead of a number where no ``backward`` runs."""

_REFUSALS = (RuntimeError, TypeError)
"""The types of a refusal; ``NotImplementedError`` is one of the first."""

_COSTLY = frozenset(data_files.read(__file__, "costly_operators.json"))
"""Operators that formulas of derivatives call and that take long, without the ``_`` of those in place."""

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
    return [name for name in registrations_for_dispatch_key(key) if _is_wrapped(name) and not _writes_to_given(name)]


def _is_wrapped(name: str) -> bool:
    """Return whether only ``backward`` calls an operator, or a frame of Python is a small part of its time."""
    namespace, _, operator = name.partition("::")
    packet = operator.partition(".")[0]
    return namespace == "aten" and ("_backward" in packet or not _COSTLY.isdisjoint((packet, packet.removesuffix("_"))))


@functools.cache
def _writes_to_given(name: str) -> bool:
    """Return whether an operator writes to tensors that are given for its results. Autograd calls no such overload."""
    return any(argument.kwarg_only and argument.alias_info is not None for argument in schema_of(name).arguments)


def refusing_kernels(key: str) -> Mapping[str, Callable[..., Any]]:
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
