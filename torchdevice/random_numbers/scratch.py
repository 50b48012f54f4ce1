"""Memory for arrays that are gone when a kernel has drawn its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy

CHUNK = 32768
"""Elements that are computed at a time: their arrays fit into a core's cache."""

_LINE = 64
"""The bytes in a line of a cache. A vector that reads from two takes longer."""

_SIZE = 16 * 8 * CHUNK
"""The bytes of more arrays of a chunk than a kernel needs."""

_MOST_KNOWN = 256
"""Arrays that are kept, as it takes a tenth of a microsecond to find one, and five to make it."""


class Scratch:
    """Arrays in memory that is used again, since a new page takes longer than a computation.

    Attributes:
        used: The bytes that were handed out since this was last set to 0.
    """

    def __init__(self) -> None:
        memory = numpy.empty(_SIZE + _LINE, numpy.uint8)
        start = -memory.ctypes.data % _LINE
        self._memory, self.used = memory[start : start + _SIZE], 0
        self._known: dict[tuple[int, int, numpy.dtype[Any]], tuple[Any, int]] = {}

    def array(self, count: int, dtype: numpy.dtype[Any]) -> Any:
        """Return an array with anything in it."""
        key = self.used, count, dtype
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known.setdefault(key, self._made(count, dtype))
        array, self.used = found
        return array

    def _made(self, count: int, dtype: numpy.dtype[Any]) -> tuple[Any, int]:
        end = self.used + count * dtype.itemsize
        assert end <= _SIZE
        return self._memory[self.used : end].view(dtype), -(-end // _LINE) * _LINE


_spare: list[Scratch] = []
"""Memory that is not in use. Threads that draw at the same time have memory of their own."""


@contextlib.contextmanager
def borrowed() -> Iterator[Scratch]:
    """Lend memory for a block."""
    try:
        scratch = _spare.pop()  # in one step, as another thread may take the last one
    except IndexError:
        scratch = Scratch()
    scratch.used = 0
    yield scratch
    # Not after an error, whose traceback may hold the arrays.
    if not _spare:
        _spare.append(scratch)
