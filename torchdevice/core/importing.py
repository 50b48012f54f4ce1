"""How a scope learns that a module is imported, by whatever statement, while it is active."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from torchdevice.core import thread_state
from torchdevice.core.patching import Patch, do_all, together
from torchdevice.foundation import torch_internals

Maker = Callable[[ModuleType], list[Patch]]
"""Returns the patches of a module."""


class Late:
    """Patches of a module that programs import themselves: put in as soon as it is imported.

    Args:
        name: The module's full name.
        makers: Return the patches for the module.
        sees_scope: Whether the module's text runs in the scope; a module of torch sees the machine as it is.
        error: What is raised, with the name, where the module must not be imported. It is found all the same, so
            that a program may ask for it.

    Attributes:
        patches: The patches, from the first installation on.
    """

    def __init__(self, name: str, *makers: Maker, sees_scope: bool = False, error: type[Exception] | None = None):
        self.name, self.makers, self.sees_scope, self.error = name, list(makers), sees_scope, error
        self.patches: list[Patch] = []

    def install(self) -> None:
        """Put the patches in. The module has been imported."""
        if self.makers and not self.patches:
            torch_internals.check("later", self.name)
            # Made once: the module stays the same object for the process.
            self.patches = together([patch for make in self.makers for patch in make(sys.modules[self.name])])
        for patch in self.patches:
            patch.install()

    def remove(self) -> None:
        """Take the patches out."""
        for patch in reversed(self.patches):
            patch.remove()


class LateModules:
    """All modules that a scope waits for, as one patch: a finder that finds these modules as Python does.

    Attributes:
        modules: The modules by name.
    """

    def __init__(self, modules: Iterable[Late]):
        self.modules = {each.name: each for each in modules}

    def install(self) -> None:
        # At the front, before the finders that would load a module unseen.
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        for name, late in self.modules.items():
            # None keeps Python from importing a module; one that is being imported is there without its functions.
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                late.install()

    def remove(self) -> None:
        finders: list[Any] = sys.meta_path
        finders.remove(self) if self in finders else None  # on one line: somebody may come between two
        do_all([late.remove for late in reversed(self.modules.values()) if late.patches])

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        late = self.modules.get(name)
        if late is None and name.startswith(_COMPILERS):
            late = Late(name)  # a compiler keeps what it asks of the machine
        # The usual finder of files; builtin and frozen modules are not among those that are waited for.
        spec: Any = None if late is None else importlib.machinery.PathFinder.find_spec(name, path, target)
        if late is not None and spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, late)
        return spec


_COMPILERS = ("torch._inductor.", "torch._dynamo.")


class _Loader:
    """Loads a module by another loader, to which it belongs afterwards."""

    def __init__(self, loader: Any, late: Late):
        self._loader, self._late = loader, late

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        if self._late.error is not None:
            raise self._late.error(self._late.name)
        # Before the module's text runs, which may look at its own loader or reload itself.
        module.__loader__ = module.__spec__.loader = self._loader
        with contextlib.nullcontext() if self._late.sees_scope else thread_state.suspended(compiling=True):
            self._loader.exec_module(module)
        self._late.install()  # after the text, so that the functions to patch exist
