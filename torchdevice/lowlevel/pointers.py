"""Pointers that programs get, and the memory at addresses that programs give."""

from __future__ import annotations

import ctypes

Word = ctypes.c_uint64
"""A word of memory, whose ``value`` can be read and set."""

copy = ctypes.memmove
"""Copies bytes: ``copy(to, source, size)``."""


def word_at(address: int) -> Word:
    """Return the word at an address."""
    return Word.from_address(address)
