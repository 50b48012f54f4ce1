"""A folder that the processes of one run share, named by the environment: what they say once, and their reports.

The first process names the folder, and nothing of it exists until another process needs it. The first process removes
it at its end. Where the first process is killed, the next run does.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

VARIABLE = "TORCHDEVICE_RUN_FOLDER"

_NAME = re.compile(r"torchdevice-run-([0-9]+)-[0-9a-f]+")


def begin() -> None:
    """Let this process be the first of a run. What killed runs left is removed."""
    from multiprocessing import util

    try:
        temporary = tempfile.gettempdir()
    except OSError:  # there is no folder to write to
        return
    _remove_what_killed_runs_left(temporary)
    folder = os.path.join(temporary, f"torchdevice-run-{os.getpid()}-{secrets.token_hex(8)}")
    os.environ[VARIABLE] = folder
    # At the very end: multiprocessing calls this after its processes were waited for, and after what joins reports.
    util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-200)


def path() -> Path | None:
    """Return the folder of the run that this process belongs to; None where it belongs to none that still runs."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name and (leads() or is_running(_leader(name))) else None


def leads() -> bool:
    """Return whether this process is the first of its run."""
    return _leader(os.environ.get(VARIABLE, "")) == os.getpid()


def claim(what: str) -> bool:
    """Return whether this process is the first of its run to do something. It is, too, where there is no run.

    The first process writes nothing for it, but finds what others wrote.
    """
    folder = path()
    if folder is None:
        return True
    try:
        if leads():
            return not (folder / what).exists()
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / what).mkdir()
    except FileExistsError:
        return False
    except OSError:  # nothing can be written there
        return True
    return True


def _leader(folder: str) -> int:
    name = _NAME.fullmatch(os.path.basename(folder))
    return int(name[1]) if name else 0


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has waited for does not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it is somebody else's
        return True


def _remove_what_killed_runs_left(temporary: str) -> None:
    with contextlib.suppress(OSError):
        for each in Path(temporary).glob("torchdevice-run-*"):
            if _NAME.fullmatch(each.name) and not is_running(_leader(each.name)):
                shutil.rmtree(each, ignore_errors=True)
