"""The errors of the target, in the words that the program knows."""

from __future__ import annotations

import re

import torch

from torchdevice.context import Context

OF_TORCH = (RuntimeError, TypeError, ValueError)
"""The types of errors in which torch names devices."""

_TOLD = "_torchdevice_told"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def reword(context: Context, error: BaseException) -> None:
    """Name the device as the program's tensors do, and raise CUDA's out-of-memory error for the target's own.

    Raises:
        torch.OutOfMemoryError: ``error`` says that the target has no memory left.
    """
    if not error.args or not isinstance(error.args[0], str):
        return
    if context.says_program:
        _rename_device(context, error)
    if isinstance(error, torch.OutOfMemoryError):
        _tell_observers(context, error)
        return
    size = context.runtime.out_of_memory(error)
    if size is not None:
        as_cuda = torch.OutOfMemoryError(f"CUDA out of memory. {size}({context.device_type} stands in.)")
        _tell_observers(context, as_cuda)
        raise as_cuda from error


def _rename_device(context: Context, error: BaseException) -> None:
    if context.device_type in error.args[0]:
        error.args = (_renamed(error.args[0], context.device_type, context.options.written_for), *error.args[1:])


def _renamed(text: str, own: str, programs: str) -> str:
    """Return a text with the device as torch would name the program's: of a device, of a type and of a backend."""
    text = re.sub(rf"\b{own}(?=:\d)|(?<=['\"]){own}(?=['\"](?! backend))", programs, text)
    text = re.sub(rf"\b{own}(\w+)Type\b", rf"torch.{programs}.\1Tensor", text)
    return re.sub(rf"{own}(?=' backend)", programs.upper(), text)


def _tell_observers(context: Context, error: torch.OutOfMemoryError) -> None:
    """Tell who asked for it, once: an error passes here with each torch function that it leaves."""
    if not context.out_of_memory_observers or hasattr(error, _TOLD):
        return
    setattr(error, _TOLD, True)
    wanted = re.search(r"Tried to allocate ([\d.]+) (\w+)", str(error))
    size = int(float(wanted[1]) * _UNITS.get(wanted[2], 1)) if wanted else 0
    device = context.thread.device_index
    index = context.device(device).index or 0
    total, free = context.runtime.total_memory(index), context.runtime.free_memory(index)
    for observer in list(context.out_of_memory_observers):
        observer(device, size, total, free)
