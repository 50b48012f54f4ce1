"""Rewords errors of the target as the errors of the accelerator that the program is written for."""

from __future__ import annotations

import re

import torch

from torchdevice.core import Context
from torchdevice.errors import TorchDeviceError

OF_TORCH = (RuntimeError, TypeError, ValueError, AttributeError)
"""The types of errors in which torch names devices."""

_TOLD = "_torchdevice_told"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def reword(context: Context, error: BaseException) -> None:
    """Name the device in an error as the program spells it, and raise CUDA's out-of-memory error for the target's.

    Raises:
        torch.OutOfMemoryError: ``error`` is the target's out-of-memory error.
    """
    if not error.args or not isinstance(error.args[0], str):
        return
    if context.shown_as is not None and context.device_type in error.args[0]:
        error.args = (_renamed(error.args[0], context.device_type, context.shown_as), *error.args[1:])
    text = _out_of_memory_text(context, error)
    if isinstance(error, torch.OutOfMemoryError):
        if text is not None:
            error.args = (text,)
        _tell_observers(context, error)
    elif text is not None:
        as_cuda = torch.OutOfMemoryError(text)
        _tell_observers(context, as_cuda)
        raise as_cuda from error


def is_final(context: Context, error: BaseException) -> bool:
    """Return whether a call that raised an error is not to be made again. Its text is then in the program's words.

    What memory was short of is counted once, and what was found out is told once.
    """
    if isinstance(error, torch.OutOfMemoryError):
        reword(context, error)
    return isinstance(error, (TorchDeviceError, torch.OutOfMemoryError))


def class_for_out_of_memory(context: Context, error: BaseException | None) -> type[RuntimeError]:
    """Return the class by which a program catches ``error``, if it is the target's out-of-memory error.

    An operator that no mode sees raises the target's own RuntimeError. A program that names the class in an ``except``
    clause reads the name while Python handles that error, whose text is then made CUDA's.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError
    text = _out_of_memory_text(context, error)
    if text is not None:
        error.args = (text,)
        _tell_observers(context, error)
        setattr(error, _TOLD, True)
    return RuntimeError if hasattr(error, _TOLD) else torch.OutOfMemoryError


def _out_of_memory_text(context: Context, error: BaseException) -> str | None:
    text = context.runtime.out_of_memory(error)
    if text is None or text.startswith("CUDA out of memory."):
        return text
    return f"CUDA out of memory. {text.rstrip()} ({context.family} stands in.)"


def _renamed(text: str, own: str, programs: str) -> str:
    """Return a text with the device as torch would name the program's: of a device, of a type and of a backend."""
    text = re.sub(rf"\b{own}(?=:\d)|(?<=torch\.){own}(?=\.)|(?<=['\"]){own}(?=['\"](?! backend))", programs, text)
    text = re.sub(rf"\b{own}(\w+)Type\b", rf"torch.{programs}.\1Tensor", text)
    return re.sub(rf"{own}(?=' backend)", programs.upper(), text)


def _tell_observers(context: Context, error: RuntimeError) -> None:
    """Call the context's out-of-memory observers, once for an error that passes here from several torch functions."""
    if not context.out_of_memory_observers or hasattr(error, _TOLD):
        return
    setattr(error, _TOLD, True)
    wanted = re.search(r"Tried to allocate ([\d.]+) (\w+)", str(error))
    size = int(float(wanted[1]) * _UNITS.get(wanted[2], 1)) if wanted else 0
    device = context.thread.device_index
    index = context.target_index(device)
    total, free = context.runtime.total_memory(index), context.runtime.free_memory(index)
    for observer in list(context.out_of_memory_observers):
        observer(device, size, total, free)
