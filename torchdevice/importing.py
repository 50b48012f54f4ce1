"""Tells a scope when a module of torch is imported while the scope is active."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torchdevice import thread_state
from torchdevice.patching import Patch


class Importing:
    """A finder on ``sys.meta_path`` for one module, which is executed as if no scope were active.

    Args:
        name: The module's full name.
        imported: Called after the module was imported.
    """

    def __init__(self, name: str, imported: Callable[[], None]):
        self._name, self._imported = name, imported

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def remove(self) -> None:
        finders: list[Any] = sys.meta_path
        finders.remove(self) if self in finders else None  # on one line: a signal handler may come between two

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)  # type: ignore[assignment]
        return spec


class _Loader:
    """Loads a module by another loader, which is the module's ``__loader__`` afterwards."""

    def __init__(self, loader: Any, imported: Callable[[], None]):
        self._loader, self._imported = loader, imported

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        with thread_state.suspended(compiling=True):
            self._loader.exec_module(module)
        self._imported()


class WhenImported:
    """Patches of a module that programs need not import: in place from then on, if a scope is active.

    Args:
        name: The module's full name.
        build: Returns the patches of the module.
    """

    def __init__(self, name: str, build: Callable[[ModuleType], list[Patch]]):
        self._name, self._build = name, build
        self._importing = Importing(name, self.install)
        self._patches: list[Patch] = []

    def install(self) -> None:
        module = sys.modules.get(self._name)
        if module is None:
            self._importing.install()
            return
        self._patches = self._patches or self._build(module)
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        self._importing.remove()
        for patch in reversed(self._patches):
            patch.remove()
