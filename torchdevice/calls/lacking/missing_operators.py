"""Operators without a kernel for the target, which run on the CPU while a scope is active.

A kernel is put in front of torch's error for each of them, so operators that the target has cost
nothing. torch allows one fallback for a whole key, and its MPS build has one: it raises, or with
``PYTORCH_ENABLE_MPS_FALLBACK=1`` runs the operator on the CPU. Therefore operators get their
kernels one by one.

So are operators whose kernels refuse a call in ``backward``. There autograd calls operators from
C++, where no torch function is called again. They get a kernel that calls torch's and looks at its
error: those that only ``backward`` calls, and those of formulas of derivatives that take much
longer than the microsecond of a frame of Python. Other operators cost nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchdevice.calls.lacking.cpu_fallback import run
from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.registered_kernels import overload
from torchdevice.kernel.torch_internals import registrations_for_dispatch_key

VARIABLE = "PYTORCH_ENABLE_MPS_FALLBACK"
"""torch's own switch. A program's setting is respected: ``0`` leaves torch's error, ``1`` torch's
own fallback.
"""

COMPOSITE = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)

_LEFT_OUT = frozenset({"c10d"})
"""Namespaces whose operators talk to other processes, by the device of their tensors."""

_names = torch._C._dispatch_get_all_op_names
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


_MISSING_ON_MPS = (
    "The operator '{operator}' is not currently implemented for the MPS device. If you want this "
    "op to be considered for addition please comment on "
    "https://github.com/pytorch/pytorch/issues/141287 and mention use-case, that resulted in "
    "missing op as well as commit hash {commit}. As a temporary fix, you can set the environment "
    "variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for this op. WARNING: "
    "this will be slower than running natively on MPS."
)


def error_text(operator: str) -> str:
    """Return torch's error text for a missing kernel (aten/src/ATen/mps/MPSFallback.mm)."""
    return _MISSING_ON_MPS.format(operator=operator, commit=torch.version.git_version)


def run_on_cpu(context: Context | None, name: str, op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that the target lacks on the CPU, for a context that allows it.

    Raises:
        NotImplementedError: There is no context, or it is strict. The text is torch's.
    """
    if context is None or context.options.strict:
        raise NotImplementedError(error_text(name))
    return run(name, op, args, kwargs, context.runtime.device_type)


def lacking(key: str, lacks: Callable[[str], bool] | None = None) -> list[str]:
    """Return the operators with a CPU kernel and none for a dispatch key, except composite ones.

    Args:
        key: The dispatch key.
        lacks: Says of an operator, instead of torch's registrations for the key, whether it has no
            kernel.
    """
    return _lacking(key, lacks, len(_names()))


@functools.cache
def _lacking(key: str, lacks: Callable[[str], bool] | None, number_of_operators: int) -> list[str]:
    def has_none(name: str) -> bool:
        return not any(_has_kernel(name, each) for each in (key, *COMPOSITE))

    is_lacking = lacks or has_none
    return [
        name
        for name in _names()
        if name.partition("::")[0] not in _LEFT_OUT
        and _has_kernel(name, "CPU")
        and is_lacking(name)
    ]


def kernel_of(name: str, key: str) -> registered_kernels.Kernel:
    """Return the kernel that runs an operator on the CPU in scopes whose device lacks the operator.

    A program's setting of :data:`VARIABLE` is respected.
    """

    def kernel(keys: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        context = thread_state.state.context
        if context is None or context.runtime.corrected_key != key or VARIABLE in os.environ:
            return own(*args, **kwargs)
        if context.runtime.lacks_kernel is None and _has_kernel(name, key):  # the program's, by now
            return own(*args, **kwargs)
        return run_on_cpu(context, name, overload(name), args, kwargs)

    return kernel


def overload_of(name: str) -> Any:
    """Return an operator of ATen."""
    return overload(f"aten::{name}")


def schema_of(name: str) -> Any:
    """Return the schema of an operator by its qualified name, without the cost of making it."""
    packet, _, variant = name.partition(".")
    return torch._C._get_schema(packet, variant)


@functools.cache
def composite() -> frozenset[str]:
    """Return the qualified names of composite operators, which torch runs before a fallback."""
    return frozenset(name for key in COMPOSITE for name in registrations_for_dispatch_key(key))


def shadowed(key: str) -> set[str]:
    """Return the operators of ATen with a composite kernel and one for a dispatch key."""
    return of_aten(composite().intersection(registrations_for_dispatch_key(key)))


def of_aten(names: Iterable[str]) -> set[str]:
    """Return the operators of ATen among those with a namespace, without it."""
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def put(context: Context) -> None:
    """Put the kernels that a context needs for its target. May be called again."""
    runtime = context.runtime
    if runtime.corrected_key is not None:
        _put_lacking(runtime.corrected_key, runtime.lacks_kernel, len(_names()))
    if runtime.refusing_key is not None:
        _put_refusing(runtime.refusing_key)


@functools.cache  # once for so many operators
def _put_lacking(key: str, lacks: Callable[[str], bool] | None, number_of_operators: int) -> None:
    for name in lacking(key, lacks):
        registered_kernels.put_in_front(
            name, key, kernel_of(name, key), "operators that are lacking"
        )


# ---- refusals in backward ------------------------------------------------------------------------

_NONE = -1
"""Torch's answer instead of a number while no ``backward`` runs."""

_REFUSALS = (RuntimeError, TypeError)
"""The types of a refusal; ``NotImplementedError`` is one of the first."""

_COSTLY = frozenset(
    {
        "_cdist_forward",
        "_fft_c2c",
        "_fft_c2r",
        "_fft_r2c",
        "_index_put_impl_",
        "_linalg_eigh",
        "_linalg_solve_ex",
        "_linalg_svd",
        "_trilinear",
        "_unique",
        "_unique2",
        "cholesky_inverse",
        "cholesky_solve",
        "col2im",
        "cumprod",
        "cumsum",
        "digamma",
        "erfinv",
        "flip",
        "i0",
        "index_add",
        "index_reduce",
        "lgamma",
        "linalg_cholesky_ex",
        "linalg_cross",
        "linalg_householder_product",
        "linalg_inv_ex",
        "linalg_lu_solve",
        "linalg_matrix_exp",
        "linalg_pinv",
        "linalg_qr",
        "linalg_solve_triangular",
        "logcumsumexp",
        "lu_unpack",
        "masked_scatter",
        "ormqr",
        "polygamma",
        "put",
        "roll",
        "scatter_add",
        "scatter_reduce",
        "special_erfcx",
        "special_i0e",
        "special_i1",
        "special_i1e",
        "special_xlog1py",
        "special_zeta",
        "take",
        "triangular_solve",
        "xlogy",
    }
)
"""Operators that formulas of derivatives call and that take long, without the ``_`` of those in
place.
"""

_backward_that_runs = torch._C._current_graph_task_id


def is_refusal(context: Context, error: BaseException) -> bool:
    """Return whether the target's kernel refused a call that may run on the CPU.

    It may not in a strict scope, where the program has switched that off, and for a program that is
    written for the target, where this package does nothing.
    """
    native = context.runtime.supplied.location_tag == context.program
    off = context.options.strict or native or os.environ.get(VARIABLE) == "0"
    return not off and context.runtime.refuses(error)


def operators(key: str) -> list[str]:
    """Return the ATen operators to wrap, among those with a kernel under a dispatch key."""
    return [
        name
        for name in registrations_for_dispatch_key(key)
        if _is_wrapped(name) and not _writes_to_given(name)
    ]


def _is_wrapped(name: str) -> bool:
    """Return whether only ``backward`` calls an operator, or a Python frame costs it little."""
    namespace, _, operator = name.partition("::")
    packet = operator.partition(".")[0]
    return namespace == "aten" and (
        "_backward" in packet or not _COSTLY.isdisjoint((packet, packet.removesuffix("_")))
    )


@functools.cache
def _writes_to_given(name: str) -> bool:
    """Return whether an operator writes to ``out`` tensors. Autograd never calls such overloads."""
    return any(
        argument.kwarg_only and argument.alias_info is not None
        for argument in schema_of(name).arguments
    )


@functools.cache
def _put_refusing(key: str) -> None:
    for name in operators(key):
        registered_kernels.put_in_front(name, key, _refusing(name, key), "refusals in backward")


def _refusing(name: str, key: str) -> registered_kernels.Kernel:
    """Return a kernel that runs an operator on the CPU if the target refuses it in ``backward``."""

    def kernel(keys: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        except _REFUSALS as error:
            context = thread_state.state.context
            # Elsewhere the torch call is made again above autograd, so that its backward runs on
            # the CPU too.
            if (
                context is None
                or context.runtime.refusing_key != key
                or _backward_that_runs() == _NONE
            ):
                raise
            if not is_refusal(context, error):
                raise
        return run(name, overload(name), args, kwargs, context.device_type)

    return kernel
