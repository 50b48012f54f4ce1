"""Compiles this folder's C++ for the installed torch, in the user's cache, and loads it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchdevice.errors import NativeKernelsError
from torchdevice.kernel.python import owned_files
from torchdevice.kernel.python.logs import warn_once

_SOURCE = Path(__file__).with_name("kernels.cpp")
_INCLUDED = tuple(sorted(_SOURCE.parent.glob("*.h")))

_NAME = "torchdevice_kernels"


@functools.cache  # entering asks
def _file_name() -> str:
    """Return the kernels' file name, which encodes everything that they were built for."""
    built_for = (
        torch.__version__,
        str(torch.version.git_version),
        sysconfig.get_platform(),
        sys.version,
    )
    sources = b"".join(each.read_bytes() for each in (_SOURCE, *_INCLUDED))
    digest = hashlib.sha256("\n".join(built_for).encode() + sources).hexdigest()
    return f"{_NAME}-{digest[:16]}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def folder() -> Path:
    """Return the folder of compiled kernels, which may not exist.

    Raises:
        NativeKernelsError: This user has no folder for caches.
    """
    return path().parent


def path() -> Path:
    """Return the file of the kernels for this Python, torch and source of the package.

    Raises:
        NativeKernelsError: This user has no folder for caches.
    """
    return _path_for(os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME"))


@functools.cache  # entering asks
def _path_for(named: str, _home: str | None) -> Path:
    """Return the kernels' file for two variables' values; ``expanduser`` reads the second."""
    if os.path.isabs(named):  # else another user of the working folder could choose the code
        return Path(named, "torchdevice", _file_name())
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise NativeKernelsError(
            "this user has no home folder; name a folder for caches by XDG_CACHE_HOME="
        )
    return Path(home, ".cache", "torchdevice", _file_name())


def _digest_of(file: Path) -> Path:
    """Return the file with the digest of the kernels, as ``sha256sum`` writes it."""
    return file.with_name(f"{file.name}.sha256")


def is_built() -> bool:
    """Return whether there are kernels, loaded or in a file. Unusable ones are logged once."""
    if is_loaded():
        return True
    found = _trouble_of_file()
    if found:
        warn_once(f"Simulated devices compute by kernels in Python: {found}.")
    return found == ""


def is_loaded() -> bool:
    """Return whether this process has loaded the kernels."""
    return load.cache_info().currsize > 0


def trouble() -> str:
    """Load built kernels. Return why they cannot be used, and the remedy; else nothing."""
    if is_loaded():  # what is loaded serves after its file is gone
        return ""
    return _trouble_of_file() or ""


def _trouble_of_file() -> str | None:
    """Load the kernels of a file. Return why they are unusable, else ""; None without one."""
    try:
        file = path()
        status = os.stat(file)
    except (NativeKernelsError, OSError):
        return None
    return _trouble_of(file, status.st_ctime_ns, status.st_size)


@functools.cache  # entering asks
def _trouble_of(file: Path, time: int, size: int) -> str:
    try:
        load()
    except NativeKernelsError as error:
        return error.reason
    return ""


def why_not() -> str:
    """Return why there are no kernels, and what to do."""
    try:
        folder()
    except NativeKernelsError as error:
        return error.reason
    return (
        trouble() or "they are not built for this torch and Python; run 'torchdevice native build'"
    )


def said(option: str) -> str:
    """Describe the kernels that this option chooses on simulated devices, in a few words."""
    if option == "never":
        return "Python"
    if is_built():
        return "native"
    return f"Python ({trouble() or _FASTER})"


_FASTER = "'torchdevice native build' makes native ones, several times as fast"


def _command(result: Path) -> list[str]:
    """Return the command that compiles the kernels as torch compiles its extensions."""
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths("cpu"), sysconfig.get_paths()["include"]]
    return [
        *(
            cpp_extension.get_cxx_compiler(),
            "-O2",
            "-DNDEBUG",
            "-std=c++20",
            "-fPIC",
            "-shared",
            "-w",
        ),
        # Without them a loop with a square root is not turned into vector instructions.
        *("-fno-math-errno", "-fno-trapping-math"),
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
        *(
            f"-DTORCH_EXTENSION_NAME={_NAME}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ),
        *(f"-isystem{folder}" for folder in folders),
        *(str(_SOURCE), "-o", str(result)),
        *(f"-L{folder}" for folder in cpp_extension.library_paths("cpu")),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]


def build() -> Path:
    """Compile the kernels, unless they are there and can be used, and return their file.

    Other processes see nothing of the file before it is whole. Of several processes that build at
    the same time, one compiles and the others wait.

    Raises:
        NativeKernelsError: There is no compiler, or it fails, or other users can write to the
            folder.
    """
    found = path()
    if found.is_file() and not trouble():
        return found
    _make_folder(found.parent)
    with _locked(found.parent):
        if not found.is_file() or trouble():
            _compile_into(found)
    if reason := trouble():
        raise NativeKernelsError(f"they were built, but {reason}")
    return found


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes in a block. Killed processes leave no lock."""
    import fcntl  # Windows, for whose compiler the command is not made, has none

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile_into(file: Path) -> None:
    """Compile the kernels into the file, and write its digest beside it."""
    # Beside the result, since a file can be renamed within one file system only.
    with tempfile.TemporaryDirectory(prefix=f"{_NAME}-", dir=file.parent) as work:
        result = Path(work, file.name)
        _compile(_command(result))
        content = hashlib.sha256(result.read_bytes()).hexdigest()
        _digest_of(result).write_text(f"{content}  {file.name}\n")
        # The digest first: a library without one is not loaded.
        for made in (_digest_of(result), result):
            made.chmod(0o700)
            os.replace(made, file.with_name(made.name))


def _make_folder(folder: Path) -> None:
    """Make the folder of the kernels, for this user alone."""
    try:
        owned_files.make_private(folder)
        weakness = owned_files.weakness(folder)
    except OSError as error:
        weakness = f"{str(folder)!r} cannot be made ({error.strerror})"
    if weakness:
        raise NativeKernelsError(f"{weakness}; {_ANOTHER}")


_ANOTHER = "take that right from them (chmod go-w), or name a folder of your own by XDG_CACHE_HOME="


def _compile(command: list[str]) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        reason = (
            f"there is no C++ compiler {command[0]!r}; install one, such as g++ or clang++, or "
            "name one by CXX="
        )
        raise NativeKernelsError(reason) from None
    except subprocess.CalledProcessError as error:
        raise NativeKernelsError(
            f"the compiler {command[0]!r} failed: {error.stderr.strip()[-2000:]}"
        ) from None


def clean() -> list[Path]:
    """Remove everything compiled, for any torch, and leftovers of killed builds; return the paths.

    Raises:
        NativeKernelsError: This user has no folder for caches.
    """
    found = sorted(folder().glob(f"{_NAME}-*"))
    for each in found:
        if each.is_dir():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)
    return found


_AGAIN = "run 'torchdevice native clean', then 'torchdevice native build'"


@functools.cache
def load() -> Any:
    """Return the module with the kernels.

    Raises:
        NativeKernelsError: They are not there, are not those that were built, or other users can
            change them.
    """
    file = path()
    try:
        weakness = owned_files.weakness(file)
        if weakness:
            raise NativeKernelsError(f"{weakness}; {_ANOTHER}")
        file = Path(os.path.realpath(file))
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        if not _digest_of(file).is_file() or _digest_of(file).read_text().split()[:1] != [content]:
            raise NativeKernelsError(f"{str(file)!r} is not the file that was built; {_AGAIN}")
        spec = importlib.util.spec_from_file_location(_NAME, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, ValueError) as error:
        raise NativeKernelsError(f"{str(file)!r} cannot be loaded ({error}); {_AGAIN}") from error
    return module
