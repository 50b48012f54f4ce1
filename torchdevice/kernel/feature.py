"""Features: abilities of a scope beyond changing a program's device, each in its own folder.

The folders of the kernel, of calls and of torch's modules know no feature. ``scope/features.py``
lists a record for each, with the names of the modules that have the feature's options, patches and
the like. A module is imported where a scope first needs it. So the folder of a feature can be
deleted, and scopes that do not ask for it work as before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from torchdevice.kernel.options import Options


def _always(options: Options) -> bool:
    return True


class Feature(NamedTuple):
    """A feature. It gives what it has, each by the name of a module.

    Attributes:
        name: The package with the feature's modules.
        options: The module that declares the feature's options, in a class ``RECORD``.
        patches: The modules that register patches on import, as the files of torch's modules do,
            or that list some as ``PATCHES``.
        threads: The module with ``enter_thread(entry)``, ``leave_thread(entry)`` or both. They are
            called for each entry of a scope whose options want the feature, and can be repeated.
            ``leave_thread`` is called also for an entry that an error or an interrupt left half
            done.
        wanted: Whether options ask for ``threads``.
    """

    name: str
    options: str = ""
    patches: tuple[str, ...] = ()
    threads: str = ""
    wanted: Callable[[Options], object] = _always

    def is_present(self) -> bool:
        """Return whether the feature's folder is there. Nothing is imported of it."""
        return importlib.util.find_spec(self.name) is not None

    def call(self, name: str, argument: Any) -> Any:
        """Call a function of ``threads``, which is imported; None if it lacks the function."""
        function = _function(self.threads, name)
        return None if function is None else function(argument)


def is_there(module: str) -> bool:
    """Return whether the folder of a feature's module is there. Nothing is imported of it."""
    return importlib.util.find_spec(module.rpartition(".")[0]) is not None


@functools.cache
def _function(module: str, name: str) -> Callable[[Any], Any] | None:
    found: Callable[[Any], Any] | None = getattr(importlib.import_module(module), name, None)
    return found
