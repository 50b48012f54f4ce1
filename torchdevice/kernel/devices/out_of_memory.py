"""Tells observers that memory ran out, once for each error."""

from __future__ import annotations

import re

from torchdevice.kernel.context import Context

TOLD = "_torchdevice_told"
"""The attribute of an error of which observers were told."""

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def tell(context: Context, error: RuntimeError, ordinal: int | None = None) -> RuntimeError:
    """Tell a context's observers once that memory ran out, and return the error.

    Several may call this for one error: the allocator, and each torch function that it passes.

    Args:
        context: The context.
        error: The error. Its text has the bytes that were asked for.
        ordinal: The device on which it ran out; None for this thread's device.
    """
    if not context.observers.out_of_memory or hasattr(error, TOLD):
        return error
    setattr(error, TOLD, True)
    wanted = re.search(r"Tried to allocate ([\d.]+) (\w+)", str(error))
    size = int(float(wanted[1]) * _UNITS.get(wanted[2], 1)) if wanted else 0
    if ordinal is None:
        ordinal = context.thread.device_index
    index = context.devices.target_index(ordinal)
    total, free = context.runtime.total_memory(index), context.runtime.free_memory(index)
    for observer in list(context.observers.out_of_memory):
        observer.memory_ran_out(ordinal, size, total, free)
    return error
