"""Reads files of unknown origin: only regular ones, and no more than fits into memory."""

from __future__ import annotations

import os
import stat

from torchdevice.kernel.python.byte_sizes import written


class RefusedFileError(OSError):
    """A file that is not read; ``strerror`` has the reason."""


def read(path: str | os.PathLike[str], at_most: int) -> bytes:
    """Return the content of a regular file. Pipes and devices are not opened.

    Args:
        path: The file.
        at_most: The greatest size in bytes.

    Raises:
        OSError: The file cannot be read, is no regular file, or is larger.
    """
    _check(os.stat(path), at_most)
    # Another kind of file may have taken its place meanwhile: opening a pipe does not wait for who
    # writes to it.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(number, "rb") as file:
        _check(os.fstat(number), at_most)
        content = file.read(at_most + 1)  # files of /proc have the size 0
    if len(content) > at_most:
        raise _too_large(at_most)
    return content


def _check(status: os.stat_result, at_most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RefusedFileError(0, "it is no regular file")
    if status.st_size > at_most:
        raise _too_large(at_most)


def _too_large(at_most: int) -> OSError:
    return RefusedFileError(0, f"it is larger than {written(at_most)}")
