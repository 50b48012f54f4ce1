"""CUDA-written PyTorch programs run unmodified where there is no CUDA.

Importing this package changes nothing. ``with torchdevice.portable():``, ``@torchdevice.portable``
and ``torchdevice.enable()`` change torch until the scope is left.

PYTEST_DONT_REWRITE: there is nothing for pytest to rewrite here, and without this word it would
warn of that in every process in which the package is imported before pytest is.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")

_MODULES = {
    name: module
    for module, name in re.findall(r"^from (torchdevice\.\S+) import (\w+) as", _STUB, re.M)
}
"""Public name -> the module that defines it, as the stub for type checkers imports it from there.
"""

__all__ = [*_MODULES, "errors"]


def __getattr__(name: str) -> Any:
    # Names are imported when first used, because torch and pytest import this package through its
    # entry points wherever it is installed. That must cost nothing, and must not fail where the
    # installation is broken.
    if name == "errors":
        return importlib.import_module("torchdevice.errors")
    if name == "__version__":
        return importlib.import_module("torchdevice.version").__version__
    if name not in _MODULES:
        raise AttributeError(f"module 'torchdevice' has no attribute {name!r}")
    value = globals()[name] = getattr(_loaded(_MODULES[name]), name)
    return value


def _loaded(module: str) -> Any:
    """Import a module of the package that needs torch."""
    importlib.import_module("torch")  # first, so that its entry point finds this package whole
    with importlib.import_module("torchdevice.kernel.python.garbage_collection").paused():
        # Before a private name of torch is read.
        importlib.import_module("torchdevice.kernel.torch_internals")
        return importlib.import_module(module)


def load_ipython_extension(ipython: Any) -> None:
    """Add ``%torchdevice`` and ``%%torchdevice`` to IPython, on ``%load_ext torchdevice``."""
    _loaded("torchdevice.tools.magics").add(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Leave the scope of ``%torchdevice``, and remove the magic commands."""
    _loaded("torchdevice.tools.magics").remove(ipython)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
