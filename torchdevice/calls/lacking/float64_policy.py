"""The option ``float64=``: float64 and complex128 on a target without them, such as MPS.

A dtype that a call names is replaced before the call. A dtype that follows from other things, such
as the default dtype or the dtypes of several arguments, is known from the target's error, and the
call is made again.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchdevice.calls.lacking import doubles
from torchdevice.calls.lacking.cpu_fallback import call_on_cpu, generator_on_cpu
from torchdevice.errors import PortabilityWarning
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal.callers import program_line, warn_at
from torchdevice.kernel.options import spelled
from torchdevice.kernel.python.logs import logger
from torchdevice.kernel.stand_ins import mapped

FALLBACKS = {torch.float64: torch.float32, torch.complex128: torch.complex64}
"""A dtype that a target may lack -> the one that takes its place."""


def fit(context: Context, dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that the target can hold, and warn.

    Under ``float64="error"`` it is the dtype itself, so that torch raises; under ``"cpu"`` too, see
    :func:`keep`.
    """
    fitting = FALLBACKS.get(dtype)
    if (
        dtype not in context.dtypes.unsupported
        or fitting is None
        or context.dtypes.float64 != "float32"
    ):
        return dtype
    context.report(str(dtype), str(fitting), Fidelity.DOWNCAST)
    _warn_once_at_line(context, f"{fitting} is used", dtype)
    return fitting


def keep(
    context: Context, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor of ``device`` whose dtype the target lacks, with its values on the CPU."""
    _tell_kept(context, dtype)
    return doubles.double_of(tensor, dtype, device)


def _tell_kept(context: Context, dtype: torch.dtype) -> None:
    context.report(str(dtype), f"{dtype} on the CPU", Fidelity.FELL_BACK)
    _warn_once_at_line(context, "it is kept on the CPU, where its operators run", dtype)


def place(context: Context, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return one of the program's tensors on ``device``, in the dtype that the policy chooses."""
    if tensor.dtype not in context.dtypes.unsupported or not context.devices.is_targets(device):
        return tensor.to(device)
    if context.dtypes.keeps_doubles:
        return keep(context, tensor, tensor.dtype, device)
    return tensor.to(device, fit(context, tensor.dtype))


# ---- dtypes that a call names --------------------------------------------------------------------


def created_on_cpu(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Make a call that creates a tensor in a dtype that is kept on the CPU.

    Return None for every other call, whose ``dtype`` in ``kwargs`` is one that the target can hold
    from here on.
    """
    dtype = kwargs.get("dtype")
    if dtype not in context.dtypes.unsupported:
        return None
    device = kwargs.get("device")
    if device is None:
        if args and isinstance(args[0], torch.Tensor):
            device = args[0].device
        else:
            device = torch.get_default_device()
    if not context.devices.is_targets(torch.device(device)):
        return None
    if not context.dtypes.keeps_doubles:
        kwargs["dtype"] = fit(context, dtype)
        return None
    is_leaf = kwargs.pop("requires_grad", False)
    draws_from = kwargs.get("generator")
    if draws_from is not None:
        kwargs["generator"] = generator_on_cpu(draws_from)
    made = keep(context, func(*args, **{**kwargs, "device": "cpu"}), dtype, device)
    return made.requires_grad_() if is_leaf else made


def result_of_conversion(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and the device of what ``Tensor.to`` or a sibling makes of a tensor."""
    tensor, *rest = args
    dtype, device = tensor.dtype, tensor.device
    for value in (*rest, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, (str, torch.device)):
            device = torch.device(value)
        elif isinstance(value, torch.Tensor):
            dtype, device = value.dtype, value.device
    return dtype, device


def fit_conversion(
    context: Context, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a conversion, with a dtype that the target has for one it lacks."""
    fitting = fit(context, dtype)
    if any(isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values())):
        return mapped(
            (args, kwargs), lambda value: fitting if isinstance(value, torch.dtype) else value
        )
    if len(args) > 2 and args[2] is None:  # to(device, None, ...)
        return (*args[:2], fitting, *args[3:]), kwargs
    return args, {**kwargs, "dtype": fitting}


# ---- dtypes that follow from other things --------------------------------------------------------


def refused(context: Context, error: BaseException) -> bool:
    """Return whether an error reports a missing dtype for which the policy has a replacement."""
    return (
        bool(context.dtypes.unsupported)
        and context.dtypes.float64 != "error"
        and doubles.says_double(error)
    )


def again(context: Context, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a call again that the target refused because of a dtype.

    Under ``float64="cpu"`` it is made on the CPU. Otherwise it is made with dtypes that the target
    can hold: in place of those that it names, of tensors on the CPU, and of integers of the target
    under a default dtype of float64.
    """
    if context.dtypes.keeps_doubles:
        _tell_kept(context, torch.float64)
        return call_on_cpu(func, args, kwargs, doubles.on_target)
    kwargs = dict(kwargs)
    if kwargs.get("device") is not None and kwargs.get("dtype") is None:
        found = [value.dtype for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        kwargs["dtype"] = fit(context, found[0] if found else torch.get_default_dtype())
        return func(*args, **kwargs)
    fitted = tree_map(lambda value: _fitted(context, value), (tuple(args), kwargs))
    return func(*fitted[0], **fitted[1])


def _fitted(context: Context, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return fit(context, value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype in context.dtypes.unsupported:
        return value.to(fit(context, value.dtype))
    integral = not value.is_floating_point() and not value.is_complex()
    if (
        integral
        and value.device.type == context.device_type
        and torch.get_default_dtype() in FALLBACKS
    ):
        return value.to(fit(context, torch.get_default_dtype()))
    return value


def _warn_once_at_line(context: Context, done: str, dtype: torch.dtype) -> None:
    """Warn at the program's line, once for a line, unless messages are not wanted."""
    line = program_line()
    place = line.f_code.co_filename, line.f_lineno
    if place in context.dtypes.lines_warned_of or not logger.isEnabledFor(logging.WARNING):
        return
    context.dtypes.lines_warned_of.add(place)
    values = ("error",) if context.dtypes.keeps_doubles else ("cpu", "error")
    remedy = " or ".join(spelled("float64", value, context.entries.way) for value in values)
    told = f"{context.runtime.supplied.kind} has no {dtype}; {done}. Use {remedy} to change that."
    warn_at(line, told, PortabilityWarning)
