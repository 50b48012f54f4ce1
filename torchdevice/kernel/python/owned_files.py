"""Files that only their owner can change, as code executed from a cache must be."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def weakness(path: Path) -> str:
    """Return how another user could change a file or a folder above it, or nothing.

    Links are followed first: read the file by :func:`os.path.realpath` afterwards, too, so that the
    file that was looked at is the one that is read.

    Raises:
        OSError: The file is not there.
    """
    if not hasattr(os, "getuid"):  # Windows, where modes say nothing
        return ""
    real = Path(os.path.realpath(path))
    for each in (real, *real.parents):
        found = _weakness(each, each.stat())
        if found:
            return found
    return ""


def _weakness(path: Path, status: os.stat_result) -> str:
    if status.st_uid not in (os.getuid(), 0):
        return f"{str(path)!r} belongs to user {status.st_uid}"
    # In a folder such as /tmp, others may add files but neither replace nor rename this user's.
    is_shared = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
        return (
            f"{str(path)!r} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
        )
    return ""


def make_private(folder: Path) -> None:
    """Make a folder, and those around it that are missing, which only this user may read.

    Raises:
        OSError: That is not possible.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.is_dir():
            # By itself: of several at once only the last one has the mode.
            each.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid == os.getuid():
        folder.chmod(0o700)
