"""CUDA-written PyTorch programs run unmodified where there is no CUDA.

Importing this package changes nothing. ``with torchdevice.portable():``, ``@torchdevice.portable`` and
``torchdevice.enable()`` change torch until the scope is left.

PYTEST_DONT_REWRITE: there is nothing for pytest to rewrite here, and without this word it would warn of that in every
process in which the package is imported before pytest is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdevice import errors as errors
    from torchdevice.activation import current as current
    from torchdevice.activation import disable as disable
    from torchdevice.activation import enable as enable
    from torchdevice.activation import portable as portable
    from torchdevice.activation import simulate as simulate
    from torchdevice.devices.module import ModuleRuntime as ModuleRuntime
    from torchdevice.devices.registry import register_runtime as register_runtime
    from torchdevice.devices.runtime import Mark as Mark
    from torchdevice.devices.runtime import Memory as Memory
    from torchdevice.devices.runtime import Runtime as Runtime
    from torchdevice.devices.runtime import Stat as Stat
    from torchdevice.foundation.fidelity import Fidelity as Fidelity
    from torchdevice.journal.callers import Site as Site
    from torchdevice.journal.journal import Entry as Entry
    from torchdevice.journal.journal import Journal as Journal
    from torchdevice.options import Options as Options
    from torchdevice.report import Report as Report
    from torchdevice.scope import Scope as Scope
    from torchdevice.target_selection import TorchDevice as TorchDevice
    from torchdevice.transfer import DeviceSpec as DeviceSpec
    from torchdevice.transfer import Prefetcher as Prefetcher
    from torchdevice.transfer import ToDevice as ToDevice

    __version__: str

_NAMES = {
    "activation": "current disable enable portable simulate",
    "devices.module": "ModuleRuntime",
    "devices.registry": "register_runtime",
    "devices.runtime": "Mark Memory Runtime Stat",
    "foundation.fidelity": "Fidelity",
    "journal.callers": "Site",
    "journal.journal": "Entry Journal",
    "options": "Options",
    "report": "Report",
    "scope": "Scope",
    "target_selection": "TorchDevice",
    "transfer": "DeviceSpec Prefetcher ToDevice",
}
"""Module -> the public names that it defines."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES, "errors"]


def __getattr__(name: str) -> Any:
    # Names are imported when first used, because torch and pytest import this package through its entry points wherever
    # it is installed. That must cost nothing, and must not fail where the installation is broken.
    if name == "errors":
        return importlib.import_module("torchdevice.errors")
    if name == "__version__":
        return importlib.import_module("torchdevice.version").__version__
    if name not in _MODULES:
        raise AttributeError(f"module 'torchdevice' has no attribute {name!r}")
    importlib.import_module("torch")  # first, so that its entry point finds this package whole
    with importlib.import_module("torchdevice.foundation.garbage_collection").paused():
        importlib.import_module("torchdevice.foundation.torch_internals")  # before a private name of torch is read
        value = getattr(importlib.import_module(f"torchdevice.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def load_ipython_extension(ipython: Any) -> None:
    """Add the magic commands ``%torchdevice`` and ``%%torchdevice``: what ``%load_ext torchdevice`` calls."""
    from torchdevice import magics

    magics.add(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Leave the scope of ``%torchdevice``, and remove the magic commands."""
    from torchdevice import magics

    magics.remove(ipython)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
