"""Compiles the C++ of this folder for the installed torch, keeps the result in the user's cache folder, loads it."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import torch

from torchdevice.errors import NativeKernelsError

_SOURCE = Path(__file__).with_name("kernels.cpp")
_INCLUDED = _SOURCE.with_name("entry_points.h")

_NAME = "torchdevice_kernels"


@functools.cache  # entering asks
def _path_in(cache: str) -> Path:
    built_for = (torch.__version__, str(torch.version.git_version), sysconfig.get_platform(), sys.version)
    digest = hashlib.sha256("\n".join(built_for).encode() + _SOURCE.read_bytes() + _INCLUDED.read_bytes()).hexdigest()
    return Path(cache, "torchdevice", f"{_NAME}-{digest[:16]}{importlib.machinery.EXTENSION_SUFFIXES[0]}").expanduser()


def path() -> Path:
    """Return the file of the kernels for this Python, the installed torch and this package's source."""
    return _path_in(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


def folder() -> Path:
    """Return the folder of what was compiled, which may not exist."""
    return path().parent


def is_built() -> bool:
    """Return whether there are kernels, loaded or in their file."""
    return load.cache_info().currsize > 0 or path().is_file()


def said(option: str) -> str:
    """Return which kernels run in scopes on simulated devices with this option, in a few words."""
    if option == "never":
        return "Python"
    return "native" if is_built() else "Python ('torchdevice native build' makes native ones, several times as fast)"


def _command(result: Path) -> list[str]:
    """Return the command that compiles the kernels into a file, as torch's own extensions are compiled."""
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths("cpu"), sysconfig.get_paths()["include"]]
    return [
        *(cpp_extension.get_cxx_compiler(), "-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-w"),
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
        *(f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
        *(f"-isystem{folder}" for folder in folders),
        *(str(_SOURCE), "-o", str(result)),
        *(f"-L{folder}" for folder in cpp_extension.library_paths("cpu")),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]


def build() -> Path:
    """Compile the kernels, unless they are compiled. Other processes see nothing of the file before it is whole.

    Raises:
        NativeKernelsError: There is no compiler, or it fails.
    """
    found = path()
    if found.is_file():
        return found
    found.parent.mkdir(parents=True, exist_ok=True)
    # Beside the result, since a file can be renamed within one file system only.
    with tempfile.TemporaryDirectory(prefix=f"{_NAME}-", dir=found.parent) as work:
        command = _command(Path(work, found.name))
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except FileNotFoundError:
            reason = (
                f"there is no C++ compiler {command[0]!r}; install one, such as g++ or clang++, or name one by CXX="
            )
            raise NativeKernelsError(reason) from None
        except subprocess.CalledProcessError as error:
            raise NativeKernelsError(f"the compiler {command[0]!r} failed: {error.stderr.strip()[-2000:]}") from None
        os.replace(command[command.index("-o") + 1], found)
    return found


def clean() -> list[Path]:
    """Remove all that was compiled, for any torch, and what builds that were killed left, and return the paths."""
    found = sorted(folder().glob(f"{_NAME}-*"))
    for each in found:
        shutil.rmtree(each, ignore_errors=True) if each.is_dir() else each.unlink(missing_ok=True)
    return found


@functools.cache
def load() -> Any:
    """Return the module with the kernels, which are built."""
    spec = importlib.util.spec_from_file_location(_NAME, path())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
