"""The finders that give programs in a scope the stand-ins, behind and before all other finders.

An installed package wins, unless the program wants the stand-in instead. The modules that were
imported end with the last scope of the process, and ``sys.modules`` is then as it was. Objects that
a program has taken from them go on working.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils._triton import has_triton_package

from torchdevice.kernel.context import Context
from torchdevice.kernel.python.per_thread import PerThread, having
from torchdevice.kernel.thread_state import state
from torchdevice.packages import askers, registry


class StandInModule(ModuleType):
    """A module of a stood-in package. A name that it lacks raises an error with that fact.

    Its modules are its attributes without an import, as those are that a package imports itself.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        inner = f"{self.__name__}.{name}"
        if sys.modules.get(self.__name__) is self and registry.names_of(inner) is not None:
            return importlib.import_module(inner)
        raise AttributeError(
            f"torchdevice's stand-in for {self.__name__!r} has no {name!r}. docs/packages.md lists "
            "what it has; with packages='absent' the program finds that the package is not "
            "installed."
        )


class _Loader:
    """Makes the modules of packages that are stood in for.

    Attributes:
        made: The names of the modules that were made since a scope last ended.
    """

    def __init__(self) -> None:
        self.made: set[str] = set()

    def create_module(self, spec: Any) -> ModuleType:
        self.made.add(spec.name)
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        package = registry.package_of(module.__name__)
        names = registry.names_of(module.__name__) or {}
        module.__dict__.update({name: each.value for name, each in names.items()})
        if package is not None and module.__name__ == package:
            module.__dict__["__version__"] = registry.PACKAGES[package].version


LOADER = _Loader()


class _Distribution(importlib.metadata.Distribution):
    """A stood-in package's ``importlib.metadata``: its name, and the release it follows."""

    def __init__(self, package: str):
        self._package = package

    def read_text(self, filename: str) -> str | None:
        known = registry.PACKAGES[self._package]
        texts = {
            "METADATA": (
                f"Metadata-Version: 2.1\nName: {known.distribution}\nVersion: {known.version}\n"
            ),
            "top_level.txt": f"{self._package}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


def _context() -> Context | None:
    """Return this thread's context if its program gets stand-ins: on targets other than CUDA."""
    context = state.for_cuda
    return context if context is not None and context.options.packages != "absent" else None


def _package_of(module: str) -> str | None:
    """Return the package of a module if it has a stand-in on this system."""
    package = registry.package_of(module)
    return package if package is not None and registry.PACKAGES[package].needed else None


class FirstFinder:
    """The finder before all others: it gives stand-ins in place of installed packages.

    Libraries get them too, because one that finds the package would otherwise import the installed
    one.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module that is stood in for, where the program wants that."""
        return FINDER.spec_of(name) if self._is_wanted() else None

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Return the metadata of the packages that are stood in for, where the program wants it."""
        if not self._is_wanted():
            return ()
        return FINDER.distributions(getattr(context, "name", None))

    def _is_wanted(self) -> bool:
        context = _context()
        return context is not None and context.options.packages == "instead"


FIRST = FirstFinder()


class StandInFinder:
    """The finder behind all others, which is also the patch that puts both in place."""

    def install(self) -> None:
        finders: list[Any] = sys.meta_path
        if FIRST not in finders:
            finders.insert(0, FIRST)
        if self not in finders:
            finders.append(self)

    def remove(self) -> None:
        finders: list[Any] = sys.meta_path
        # On one line each: somebody may come between two.
        finders.remove(FIRST) if FIRST in finders else None
        finders.remove(self) if self in finders else None
        # By their names: a look at all modules would double the time of leaving.
        for name in list(LOADER.made):
            if _is_ours(sys.modules.get(name)):
                sys.modules.pop(name, None)
            LOADER.made.discard(name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a stand-in, to code that gets it."""
        package = _package_of(name)
        if (
            package is None
            or _context() is None
            or self._is_found_behind(name, path, target)
            or (name == package and not self._gets_it())
        ):
            return None
        return self.spec_of(name)

    def _gets_it(self) -> bool:
        """Return whether code that imports a package gets its stand-in."""
        if _demanding.is_on:
            return True
        who = askers.asker()
        return who is not None and askers.gets_stand_in(who)

    def spec_of(self, name: str) -> Any:
        """Return the spec of a stand-in's module; None for a module that no stand-in has."""
        package = _package_of(name)
        if package is None:
            return None
        if name != package and not _is_ours(sys.modules.get(package)):
            return None
        if registry.names_of(name) is None:
            return None
        if name == "triton":
            # torch asks once in a process, and must know that its compilers have no Triton.
            has_triton_package()
        spec = importlib.machinery.ModuleSpec(name, LOADER, origin=__file__, is_package=True)  # type: ignore[arg-type]
        spec.has_location = True
        return spec

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Return the metadata of the stand-ins, to code that gets them."""
        if _context() is None:
            return ()
        who = askers.asker()
        if who is None or not askers.gets_stand_in(who):
            return ()
        return self.distributions(getattr(context, "name", None))

    def distributions(self, name: str | None) -> Iterator[importlib.metadata.Distribution]:
        """Yield the metadata of the stand-ins, or of the one with a distribution's name."""
        wanted = None if name is None else name.replace("_", "-").lower()
        for package, known in registry.PACKAGES.items():
            is_whole = known.needed and not known.is_inner
            if is_whole and wanted in (None, known.distribution):
                yield _Distribution(package)

    def _is_found_behind(self, name: str, path: Any, target: Any) -> bool:
        """Return whether a finder behind this one finds a module, which is then installed."""
        finders: list[Any] = sys.meta_path
        behind = finders[finders.index(self) + 1 :] if self in finders else []
        return any(
            each.find_spec(name, path, target) is not None
            for each in behind
            if hasattr(each, "find_spec")
        )


_demanding = PerThread(is_on=False)


def demanded(name: str) -> Any:
    """Import a stand-in that a program has requested from a library."""
    with having(_demanding, is_on=True):
        return importlib.import_module(name)


def _is_ours(module: Any) -> bool:
    return isinstance(module, StandInModule)


FINDER = StandInFinder()

PATCHES = [FINDER]
"""The patches of a scope, see ``scope/features.py``."""
