"""How a scope learns that a module is imported, by whatever statement, while it is active."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from torchdevice.core import thread_state
from torchdevice.core.patching import Patch, together
from torchdevice.foundation import torch_internals


class Importing:
    """A finder of modules that finds one module as Python does, and calls back when the module has been imported.

    Args:
        name: The module's full name.
        imported: Called when it has been imported.
        sees_scope: Whether the module's text runs in the scope; a module of torch sees the machine as it is.
    """

    def __init__(self, name: str, imported: Callable[[], None], *, sees_scope: bool = False):
        self._name, self._imported, self._sees_scope = name, imported, sees_scope

    def install(self) -> None:
        # At the front, before the finders that would load the module unseen.
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def remove(self) -> None:
        finders: list[Any] = sys.meta_path
        finders.remove(self) if self in finders else None  # on one line: somebody may come between two

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        # The usual finder of files; builtin and frozen modules are not among those that are waited for.
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported, self._sees_scope)  # type: ignore[assignment]
        return spec


class Refusing(Importing):
    """A finder that finds modules as Python does, so that a program may ask for them, and raises at their import.

    Args:
        names: The modules' full names.
        error: Returns the error for a name.
    """

    def __init__(self, names: Collection[str], error: Callable[[str], Exception]):
        self._names, self._error = names, error

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is not None:
            spec.loader = self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: Any) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        raise self._error(module.__name__)


class _Loader:
    """Loads a module by another loader, to which it belongs afterwards."""

    def __init__(self, loader: Any, imported: Callable[[], None], sees_scope: bool):
        self._loader, self._imported, self._sees_scope = loader, imported, sees_scope

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # Before the module's text runs, which may look at its own loader or reload itself.
        module.__loader__ = module.__spec__.loader = self._loader
        with contextlib.nullcontext() if self._sees_scope else thread_state.suspended(compiling=True):
            self._loader.exec_module(module)
        self._imported()  # after the text, so that the functions to patch exist


class WhenImported:
    """Patches of a module that programs import themselves: put in as soon as it is imported.

    Args:
        name: The module's full name.
        make: Returns the patches of the module.
        sees_scope: Whether the module's text runs in the scope, see :class:`Importing`.
    """

    def __init__(self, name: str, make: Callable[[ModuleType], list[Patch]], *, sees_scope: bool = False):
        self._name, self._make = name, make
        self._importing = Importing(name, self._put_in, sees_scope=sees_scope)
        self._patches: list[Patch] | None = None

    def install(self) -> None:
        module = sys.modules.get(self._name)
        # A module that is being imported is in sys.modules already, without its functions.
        if module is None or getattr(module.__spec__, "_initializing", False):
            self._importing.install()
        else:
            self._put_in()

    def _put_in(self) -> None:
        if self._patches is None:
            torch_internals.check("later", self._name)
            # Made once: the module stays the same object for the process.
            self._patches = together(self._make(sys.modules[self._name]))
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        self._importing.remove()
        for patch in reversed(self._patches or []):
            patch.remove()
