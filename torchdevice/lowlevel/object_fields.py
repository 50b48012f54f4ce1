"""Fields of torch's C++ objects that Python can read but not set.

The offset of a field is not assumed: it is the only one at which the memory of two objects holds what torch answers for
both.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import torch

from torchdevice.errors import TorchVersionError

_WORD = ctypes.sizeof(ctypes.c_uint64)  # fields are looked for word by word, as the compiler aligns them


def offset_of(name: str, objects: Sequence[int], values: Sequence[int], words: int) -> int:
    """Return the offset in bytes of a field.

    Args:
        name: The field, for the error.
        objects: The addresses of the objects.
        values: The field's value in each object.
        words: How many words of each object to look at.

    Raises:
        TorchVersionError: No offset, or more than one, holds these values.
    """
    return place_of(name, objects, [each.to_bytes(_WORD, sys.byteorder) for each in values], words, step=_WORD)


def field(address: int, offset: int) -> ctypes.c_uint64:
    """Return a field of an object, whose ``value`` can be set."""
    return ctypes.c_uint64.from_address(address + offset)


def place_of(name: str, objects: Sequence[int], values: Sequence[bytes], words: int, step: int = 1) -> int:
    """Return the offset of a field that is not a word of its own, as :func:`offset_of` does.

    Args:
        name: The field, for the error.
        objects: The addresses of the objects.
        values: The field's bytes in each object.
        words: How many words of each object to look at.
        step: What the offset is a multiple of.

    Raises:
        TorchVersionError: No offset, or more than one, holds these values.
    """
    # Copied at once, since the objects may change while they are compared.
    held = [bytes(contents(each, words * _WORD)) for each in objects]
    found = [
        offset
        for offset in range(0, words * _WORD, step)
        if all(each[offset:].startswith(value) for each, value in zip(held, values, strict=True))
    ]
    # Two offsets with the same values are no answer: writing at the wrong one would damage the object.
    if len(found) != 1:
        raise TorchVersionError(name, torch.__version__)
    return found[0]


def contents(address: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return the bytes at an address, which can be set."""
    return (ctypes.c_ubyte * size).from_address(address)  # a view of the memory, not a copy
