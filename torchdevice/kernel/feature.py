"""Features: abilities of a scope beyond changing a program's device, each in its own folder.

The folders of the kernel, of calls and of torch's modules know no feature. A scope asks the records
in ``scope/features.py`` whether its options want a feature, and imports the feature's module only
then. So the folder of a feature can be deleted, and scopes that do not ask for it work as before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from torchdevice.kernel.options import Options


class Feature(NamedTuple):
    """A feature, by the module that is imported when a scope first wants the feature.

    The module has any of these functions. Both are called for each entry of a scope, and can be
    repeated:

    - ``enter_thread(entry)``;
    - ``leave_thread(entry)``, also for an entry that an error or an interrupt left half done.

    Attributes:
        module: The module's name.
        wanted: Whether options ask for the feature.
    """

    module: str
    wanted: Callable[[Options], object]

    def call(self, name: str, argument: Any) -> Any:
        """Call a function of the module, which is imported; None if it lacks the function."""
        function = _function(self.module, name)
        return None if function is None else function(argument)


def is_there(module: str) -> bool:
    """Return whether the folder of a feature's module is there. Nothing is imported of it."""
    return importlib.util.find_spec(module.rpartition(".")[0]) is not None


@functools.cache
def _function(module: str, name: str) -> Callable[[Any], Any] | None:
    found: Callable[[Any], Any] | None = getattr(importlib.import_module(module), name, None)
    return found
