"""A folder that the processes of a run share through the environment, for notices and reports.

The first process names the folder, and nothing of it exists until another process needs it. The
first process removes it at its end. Where the first process is killed, the next run does. Hosts and
containers may share the place of temporary files, so the name also says where the first process has
its number.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import tempfile
import zlib
from pathlib import Path

VARIABLE = "TORCHDEVICE_RUN_FOLDER"

_NAME = re.compile(r"torchdevice-run-([0-9a-f]{8})-([0-9]+)-[0-9a-f]+")
"""Where the first process is, its number, and what no other run has."""

_CONTENT = re.compile(r"[0-9a-f]{8}|[0-9]+-[0-9a-f]{8}\.(?:begun|part|json|failed|waits|stack)")
"""What a run writes: folders of logged messages, and files of its processes."""


def begin() -> None:
    """Let this process be the first of a run. Leftovers of killed runs are removed."""
    from multiprocessing import util

    try:
        temporary = tempfile.gettempdir()
    except OSError:  # there is no folder to write to
        return
    with contextlib.suppress(OSError):
        for each in Path(temporary).glob("torchdevice-run-*"):
            if not _leader_may_run(each.name):  # a run that was killed left it
                remove(each)
    folder = os.path.join(
        temporary, f"torchdevice-run-{_here()}-{os.getpid()}-{os.urandom(8).hex()}"
    )
    os.environ[VARIABLE] = folder
    # At the very end: multiprocessing calls this after its processes were waited for, and after
    # what joins reports.
    util.Finalize(None, remove, args=(folder,), exitpriority=-200)


def path() -> Path | None:
    """Return the folder of this process's run; None if it has none that is still running."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name and _leader_may_run(name) else None


def leads() -> bool:
    """Return whether this process is the first of its run."""
    found = _NAME.fullmatch(os.path.basename(os.environ.get(VARIABLE, "")))
    return found is not None and (found[1], found[2]) == (_here(), str(os.getpid()))


def leave(suffix: str, text: str, token: str = "") -> bool:
    """Leave a text to the first process of the run, and return whether that was possible.

    Args:
        suffix: The kind of the text, as the suffix of a file.
        text: The text.
        token: Eight digits: the text replaces one of the same kind that this process left with
            them. Without them it stands beside the others.
    """
    with contextlib.suppress(OSError):  # nothing can be written there
        unfinished = path_of(".part", token or os.urandom(4).hex())
        if unfinished is not None:
            unfinished.write_text(text)
            # Other processes see nothing before the file is whole.
            unfinished.replace(unfinished.with_suffix(suffix))
            return True
    return False


def path_of(suffix: str, token: str) -> Path | None:
    """Return the path of a file of this process in the folder of its run, which exists then.

    Args:
        suffix: The kind of the file.
        token: Eight digits that tell this process's files of that kind apart.

    Returns:
        The path; None where this process belongs to no run, begins it, or can write nothing there.
    """
    folder = path()
    if folder is None or leads():
        return None
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / f"{os.getpid()}-{token}{suffix}"
    return None


def left(suffix: str) -> list[str]:
    """Return the texts that processes of the run have left."""
    folder = path()
    if folder is None:
        return []
    return [each.read_text() for each in sorted(folder.glob(f"*{suffix}"))]


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove the folder of a run, but nothing that no run has made."""
    if not _NAME.fullmatch(os.path.basename(folder)) or os.path.islink(folder):
        return
    with contextlib.suppress(OSError):
        for each in Path(folder).iterdir():
            if not _CONTENT.fullmatch(each.name):
                continue
            if each.is_dir() and not each.is_symlink():
                each.rmdir()
            else:
                each.unlink()
        os.rmdir(folder)


def claim(what: str) -> bool:
    """Return whether this process is its run's first to do something, or has no run.

    The first process writes nothing for it, but reads the files of others.
    """
    folder = path()
    if folder is None or leads():
        return folder is None or not (folder / what).exists()
    with contextlib.suppress(OSError):  # nothing can be written there
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / what).mkdir()
        except FileExistsError:
            return False
    return True


def _leader_may_run(folder: str) -> bool:
    """Return whether a folder is that of a run whose first process is not known to have ended."""
    found = _NAME.fullmatch(os.path.basename(folder))
    return found is not None and (found[1] != _here() or is_running(int(found[2])))


@functools.cache
def _here() -> str:
    """Return a name for the host, or the container on it, that numbers its processes."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):  # not on Linux
        parts.append(os.readlink("/proc/self/ns/pid"))
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    return f"{zlib.crc32(' '.join(parts).encode()):08x}"


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has waited for does not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it is somebody else's
        return True
