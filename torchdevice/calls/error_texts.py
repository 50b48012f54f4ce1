"""Errors of the target: reworded for the program's accelerator, or answered by another call."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.calls.lacking import dtype_gaps, float64_policy
from torchdevice.calls.lacking.cpu_fallback import call_on_cpu, counted
from torchdevice.calls.lacking.missing_operators import is_refusal
from torchdevice.calls.rewriters import Rewriter
from torchdevice.errors import TorchDeviceError
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices import out_of_memory
from torchdevice.kernel.devices.device_strings import tensor_type
from torchdevice.kernel.python.uncaught_errors import add_note
from torchdevice.kernel.stand_ins import tensors

OF_TORCH = (RuntimeError, TypeError, ValueError, AttributeError)
"""The types of errors in which torch names devices."""


def reword(context: Context, error: BaseException) -> None:
    """Name the device in an error as the program spells it; raise CUDA's class for out of memory.

    Raises:
        torch.OutOfMemoryError: ``error`` is the target's out-of-memory error.
    """
    if not error.args or not isinstance(error.args[0], str):
        return
    if context.shown_as is not None and context.device_type in error.args[0]:
        named = _renamed(error.args[0], context.device_type, context.shown_as)
        error.args = (named, *error.args[1:])
    if isinstance(error, torch.OutOfMemoryError):
        text = _out_of_memory_text(context, error)
        if text is not None:
            error.args = (text,)
        out_of_memory.tell(context, error)
    else:
        raise_out_of_memory(context, error)


def name_types(context: Context | None, error: BaseException) -> None:
    """Name the types of tensors in torch's error, which nobody has caught, as the program does.

    ``engine="wrap"`` does not see a call that carries no device. What such a call composes before
    any kernel, as a convolution of complex numbers does, names the target.
    """
    if context is None or context.shown_as is None:
        return
    if type(error) is not RuntimeError or not error.args:
        return
    if isinstance(error.args[0], str) and context.device_type in error.args[0]:
        text = _with_types(error.args[0], context.device_type, context.shown_as)
        error.args = (text, *error.args[1:])


def raise_out_of_memory(context: Context, error: BaseException) -> None:
    """Raise CUDA's class if an error is the target's out-of-memory error of another class.

    Raises:
        torch.OutOfMemoryError: It is. The text is CUDA's.
    """
    text = _out_of_memory_text(context, error)
    if text is not None:
        # The error contains the target's text, and its cause is this package's.
        raise _with_limit(
            context, out_of_memory.tell(context, torch.OutOfMemoryError(text))
        ) from None


def _with_limit(context: Context, error: RuntimeError) -> RuntimeError:
    """Note on an error that this machine's memory ran out, where a device has none of its own."""
    note = context.runtime.supplied.note_of_full_host
    if note:
        add_note(error, note)
    return error


def is_final(context: Context, error: BaseException) -> bool:
    """Return whether a call that raised an error must not be repeated. Its text is then reworded.

    An error is counted once, and its text is reworded once.
    """
    if isinstance(error, torch.OutOfMemoryError):
        reword(context, error)
    return isinstance(error, (TorchDeviceError, torch.OutOfMemoryError))


def class_for_out_of_memory(context: Context, error: BaseException | None) -> type[RuntimeError]:
    """Return the class that programs catch if ``error`` is the target's out-of-memory error.

    An operator that no mode sees raises the target's own RuntimeError. A program that names the
    class in an ``except`` clause reads the name while Python handles that error, whose text is then
    made CUDA's.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError
    text = _out_of_memory_text(context, error)
    if text is not None:
        error.args = (text,)
        out_of_memory.tell(context, error)
        setattr(error, out_of_memory.TOLD, True)
    return RuntimeError if hasattr(error, out_of_memory.TOLD) else torch.OutOfMemoryError


def _out_of_memory_text(context: Context, error: BaseException) -> str | None:
    text = context.runtime.out_of_memory(error)
    if text is None or text.startswith("CUDA out of memory."):
        return text
    return f"CUDA out of memory. {text.rstrip()} ({context.names.family} stands in.)"


def _renamed(text: str, own: str, programs: str) -> str:
    """Return a text in which devices, types and backends have the program's names."""
    text = re.sub(
        rf"\b{own}(?=:\d)|(?<=torch\.){own}(?=\.)|(?<=['\"]){own}(?=['\"](?! backend))",
        programs,
        text,
    )
    text = _with_types(text, own, programs)
    return re.sub(rf"{own}(?=' backend)", programs.upper(), text)


def _with_types(text: str, own: str, programs: str) -> str:
    """Return a text in which types of tensors have the program's names."""
    return re.sub(rf"\b{own}(\w+)Type\b", lambda found: tensor_type(found[1], programs), text)


Detour = Callable[[Any, Any], Any]
"""Makes a call, given its arguments and keyword arguments."""


def detour_after_raised(context: Context, func: Any, rewriter: Rewriter | None) -> Detour | None:
    """Reword the error that an ``except`` clause handles, and return :func:`detour_after` it.

    Raises:
        torch.OutOfMemoryError: The error is the target's out-of-memory error.
    """
    error = sys.exc_info()[1]
    assert error is not None, "no error is handled"
    reword(context, error)
    return detour_after(error, context, func, rewriter)


def detour_after(
    error: BaseException, context: Context, func: Any, rewriter: Rewriter | None
) -> Detour | None:
    """Return how to make a call that raised ``error``; None where the error is the program's.

    Args:
        error: The error.
        context: The active context.
        func: The torch function that was called.
        rewriter: Its rewriter, if it has one.
    """
    lacked = dtype_gaps.lacking(error)
    # The kernels of a GPU, a simulated one too, have CUDA's dtypes, and tensors of the CPU beside
    # it the CPU's. But torch refuses float16 in transforms before it asks for a kernel.
    is_transform = getattr(func, "__name__", "").startswith("fft_")
    may_be_cudas = is_transform or context.runtime.supplied.location_tag != "cuda"
    if lacked is not None and may_be_cudas and dtype_gaps.can_be_repeated(func):
        return functools.partial(
            dtype_gaps.compute, context, lacked, func, func.__name__.partition(".")[0]
        )
    if float64_policy.refused(context, error) and dtype_gaps.can_be_repeated(func):
        return functools.partial(float64_policy.again, context, _rewritten(context, func, rewriter))
    if is_refusal(context, error) and dtype_gaps.can_be_repeated(func):
        return functools.partial(_on_cpu, context, func, error)
    return None


def _on_cpu(context: Context, func: Any, error: BaseException, args: Any, kwargs: Any) -> Any:
    """Make a call on the CPU, counted at its line with the refused operator and dtypes.

    Raises:
        BaseException: The target's error, where all tensors of the call are the CPU's already.
    """
    found = list(tensors((args, kwargs)))
    given = sorted({str(value.dtype) for value in found})
    if all(value.is_cpu for value in found):
        try:
            raise error
        finally:
            del error  # whose traceback has this frame
    name = f"{func.__name__} in {', '.join(given)}"
    return counted(context, name, lambda: call_on_cpu(func, args, kwargs), (args, kwargs))


def _rewritten(context: Context, func: Any, rewriter: Rewriter | None) -> Any:
    """Return the function with its device argument rewritten, as the failed call may name one."""
    if rewriter is None:
        return func
    return lambda *args, **kwargs: rewriter(context, func, args, kwargs)
