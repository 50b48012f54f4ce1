"""Numbers of bytes as a person reads them."""

from __future__ import annotations

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def scaled(size: int, *, beyond: int = 0) -> tuple[float, str]:
    """Return bytes in the largest unit that is reached with ``beyond`` to spare, and the unit."""
    for unit, name in _UNITS:
        if size >= unit + beyond:
            return size / unit, name
    return size, "bytes"


def written(size: int) -> str:
    """Return a number of bytes as ``c10::CachingAllocator::format_size`` writes it."""
    number, unit = scaled(size, beyond=1)  # 1 GiB is "1024.00 MiB" there
    return f"{number} {unit}" if unit == "bytes" else f"{number:.2f} {unit}"


def exact(size: int) -> str:
    """Return bytes in their largest whole unit, as an option of memory takes it."""
    for unit, name in _UNITS:
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)
