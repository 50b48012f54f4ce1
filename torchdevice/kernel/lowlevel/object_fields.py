"""Memory at addresses from programs, and torch's C++ fields that Python can read but not set.

The offset of a field is not assumed: it is the only one at which the memory of two objects holds
what torch answers for both.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

from torchdevice.errors import TorchVersionError

Word = ctypes.c_uint64
"""A word of memory, whose ``value`` can be read and set."""

word_at = Word.from_address
"""Returns the word at an address."""

copy = ctypes.memmove
"""Copies bytes: ``copy(to, source, size)``."""

_WORD = ctypes.sizeof(Word)  # fields are looked for word by word, as the compiler aligns them


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
    found = offsets(objects, values, words)
    # Two offsets with the same values are ambiguous: a write at the wrong one damages the object.
    if len(found) != 1:
        import torch  # not above: a sub-interpreter, which may ask for offsets, cannot import torch

        raise TorchVersionError(name, torch.__version__, "simulated devices")
    return found[0]


def offsets(objects: Sequence[int], values: Sequence[int], words: int) -> list[int]:
    """Return the offsets in bytes at which each object holds its value, among so many words."""
    fields = ctypes.c_ubyte * (words * _WORD)
    held = [bytes(fields.from_address(each)) for each in objects]
    wanted = [each.to_bytes(_WORD, sys.byteorder) for each in values]
    pairs = list(zip(held, wanted, strict=True))
    places = range(0, words * _WORD, _WORD)
    return [
        place for place in places if all(each[place:].startswith(value) for each, value in pairs)
    ]
