"""Compiles ``kernels.cpp`` for the installed torch, keeps the result in the user's cache folder, and loads it."""

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

_NAME = "torchdevice_kernels"

BUILD = "torchdevice native build"
"""The command that compiles the kernels."""

CACHE = "TORCHDEVICE_CACHE"
"""The variable that names another folder than the user's for what was compiled."""


def folder() -> Path:
    """Return the folder of what was compiled, which may not exist."""
    if CACHE in os.environ:
        return Path(os.environ[CACHE]).absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "torchdevice"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchdevice"


def path() -> Path:
    """Return the file of the kernels for this Python, the installed torch and this package's source."""
    built_for = (torch.__version__, str(torch.version.git_version), sysconfig.get_platform(), sys.version)
    digest = hashlib.sha256("\n".join(built_for).encode() + _SOURCE.read_bytes()).hexdigest()
    return folder() / f"{_NAME}-{digest[:16]}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def is_built() -> bool:
    """Return whether the kernels are compiled for this Python, torch and source."""
    return path().is_file()


def said(option: str) -> str:
    """Return which kernels run in scopes on simulated devices with this option, in a few words."""
    if option != "never" and is_built():
        return "native"
    return "Python" if option == "never" else f"Python ({BUILD!r} makes native ones)"


def _compiler() -> str:
    from torch.utils import cpp_extension

    name: str = cpp_extension.get_cxx_compiler()
    return name


def obstacle() -> str | None:
    """Return why the kernels cannot be compiled here; None where they can."""
    if sys.platform == "win32":
        return "they are not written for Windows"
    if shutil.which(_compiler()) is None:
        return f"there is no C++ compiler {_compiler()!r}; install one, such as g++ or clang++, or name one by CXX="
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "there is no Python.h; install the development files of this Python"
    return None


def _command(result: Path) -> list[str]:
    """Return the command that compiles the kernels into a file, as torch's own extensions are compiled."""
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths("cpu"), sysconfig.get_paths()["include"]]
    libraries = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    shared = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        *(_compiler(), "-O2", "-std=c++20", "-fPIC", "-shared", "-w", *shared),
        *(f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-isystem{folder}" for folder in folders),
        *(str(_SOURCE), "-o", str(result)),
        *(f"-L{folder}" for folder in cpp_extension.library_paths("cpu")),
        *libraries,
    ]


def build() -> Path:
    """Compile the kernels, unless they are compiled. Other processes see nothing of the file before it is whole.

    Raises:
        NativeKernelsError: There is no compiler, or it fails.
    """
    found = path()
    if found.is_file():
        return found
    if reason := obstacle():
        raise NativeKernelsError(reason)
    folder().mkdir(parents=True, exist_ok=True)
    # Beside the result, since a file can be renamed within one file system only.
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder()) as work:
        result = Path(work, found.name)
        done = subprocess.run(_command(result), capture_output=True, text=True)
        if done.returncode:
            raise NativeKernelsError(f"the compiler {_compiler()!r} failed: {done.stderr.strip()[-2000:]}")
        os.replace(result, found)
    return found


def clean() -> list[Path]:
    """Remove everything that was compiled, for any torch, and return the files."""
    found = sorted(folder().glob(f"{_NAME}-*")) if folder().is_dir() else []
    for each in found:
        each.unlink(missing_ok=True)
    return found


@functools.cache
def load() -> Any:
    """Return the module with the kernels, which are built."""
    spec = importlib.util.spec_from_file_location(_NAME, path())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
