"""How a torch call that the target refused is made instead, by the error that it raised."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchdevice.core import Context
from torchdevice.engines import dtype_gaps, float64_policy
from torchdevice.engines.rewriters import Rewriter
from torchdevice.fallback.cpu_fallback import call_on_cpu, counted
from torchdevice.fallback.fallback_kernels import is_refusal
from torchdevice.foundation.stand_ins import tensors

Detour = Callable[[Any, Any], Any]
"""Makes a call, given its arguments and keyword arguments."""


def after(error: BaseException, context: Context, func: Any, rewriter: Rewriter | None) -> Detour | None:
    """Return how to make a call that raised ``error``; None where the error is the program's.

    Args:
        error: The error.
        context: The active context.
        func: The torch function that was called.
        rewriter: Its rewriter, if it has one.
    """
    lacked = dtype_gaps.lacking(error)
    if lacked is not None and dtype_gaps.can_be_repeated(func):
        name = func.__name__.partition(".")[0]
        return functools.partial(dtype_gaps.compute, context, lacked, func, name)
    if float64_policy.refused(context, error) and dtype_gaps.can_be_repeated(func):
        return functools.partial(float64_policy.again, context, _rewritten(context, func, rewriter))
    if is_refusal(context, error) and dtype_gaps.can_be_repeated(func):
        return functools.partial(_on_cpu, context, func)
    return None


def _on_cpu(context: Context, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a call on the CPU, counted at its line with the operator and the dtypes that the target refused."""
    given = sorted({str(value.dtype) for value in tensors((args, kwargs))})
    name = f"{func.__name__} in {', '.join(given)}"
    return counted(context, name, lambda: call_on_cpu(func, args, kwargs), (args, kwargs))


def _rewritten(context: Context, func: Any, rewriter: Rewriter | None) -> Any:
    """Return the function with its device argument rewritten: the call that failed may name a device."""
    return func if rewriter is None else lambda *args, **kwargs: rewriter(context, func, args, kwargs)
