"""Reading and writing arrays of addresses.

A window is an array over the memory between the lowest and the highest of the addresses; only their
own elements are touched. The caller has checked that each address is that of memory which it may
use.
"""

from __future__ import annotations

import ctypes
from typing import Any


def _window(at: Any, dtype: Any) -> tuple[Any, Any]:
    """Return an array over the memory at addresses, aligned or not, and each one's index in it."""
    import numpy as np

    lowest, size = at.min(), dtype.itemsize
    length = int(at.max() - lowest + size)
    memory: Any = (ctypes.c_char * length).from_address(int(lowest))
    offsets = (at - lowest).view(np.int64)
    if np.bitwise_or.reduce(offsets, axis=None) & (size - 1):
        # An element at every byte.
        return np.ndarray(len(memory) - size + 1, dtype, memory, strides=(1,)), offsets
    offsets >>= size.bit_length() - 1
    return np.ndarray(len(memory) // size, dtype, memory), offsets


def read(at: Any, active: Any, default: Any, dtype: Any) -> Any:
    """Return elements at active addresses, and ``default`` at others. All shapes are equal."""
    if active.all():
        window, index = _window(at, dtype)
        return window[index]
    result = default.astype(dtype)
    if active.any():
        window, index = _window(at[active], dtype)
        result[active] = window[index]
    return result


def write(at: Any, active: Any, values: Any) -> None:
    """Write values to active addresses. The last of several values for an address stays."""
    if active.any():
        window, index = _window(at[active], values.dtype)
        window[index] = values[active]
