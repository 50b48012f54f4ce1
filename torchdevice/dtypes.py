"""The policy for dtypes that a target cannot hold: float64 and complex128 on MPS. The option is ``float64=``."""

from __future__ import annotations

import logging
from typing import Any

import torch

from torchdevice.call_sites import program_line, warn_at
from torchdevice.context import Context
from torchdevice.errors import PortabilityWarning
from torchdevice.fidelity import Fidelity
from torchdevice.logs import logger

_FALLBACKS = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def fit(context: Context, dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that the target can hold; the dtype itself under ``float64="error"``, so that torch raises."""
    fitting = _FALLBACKS.get(dtype)
    if dtype not in context.unsupported_dtypes or fitting is None or context.options.float64 == "error":
        return dtype
    if context.report(str(dtype), str(fitting), Fidelity.DOWNCAST):
        _warn_at_program(
            f"{context.device_type} has no {dtype}; {fitting} is used. Use float64='error' to be told where."
        )
    return fitting


def fit_creation(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fit the ``dtype`` of a call that creates a tensor, in ``kwargs``.

    Without a device the tensor is made where the call's first argument is, or on the default device.
    """
    dtype = kwargs.get("dtype")
    if dtype not in context.unsupported_dtypes:
        return
    device = kwargs.get("device")
    if device is None:
        device = args[0].device if args and isinstance(args[0], torch.Tensor) else torch.get_default_device()
    if torch.device(device).type == context.device_type:
        kwargs["dtype"] = fit(context, dtype)


def fit_conversion(
    context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``Tensor.to`` or a sibling with a dtype that the target can hold."""
    tensor, *rest = args
    named = [value for value in (*rest, *kwargs.values()) if isinstance(value, torch.dtype)]
    devices = [value for value in (*rest, *kwargs.values()) if isinstance(value, torch.device)]
    if (devices[0] if devices else tensor.device).type != context.device_type:
        return args, kwargs
    if not named and tensor.dtype in context.unsupported_dtypes:
        fitting = fit(context, tensor.dtype)
        if len(args) > 2 and args[2] is None:  # to(device, None, ...)
            return (*args[:2], fitting, *args[3:]), kwargs
        return args, {**kwargs, "dtype": fitting}

    def fitted(value: Any) -> Any:
        return fit(context, value) if isinstance(value, torch.dtype) else value

    return (tensor, *map(fitted, rest)), {name: fitted(value) for name, value in kwargs.items()}


def _warn_at_program(message: str) -> None:
    """Warn at the program's line, unless messages are not wanted."""
    if logger.isEnabledFor(logging.WARNING):
        warn_at(program_line(), message, PortabilityWarning)
