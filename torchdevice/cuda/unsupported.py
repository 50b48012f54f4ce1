"""Names without an equivalent on a stand-in device, such as raw pointers and allocators. Each raises with a remedy.

``unsupported.json`` lists them: names of ``torch._C``, which are supplied, and functions of torch's Python.
"""

from __future__ import annotations

import pkgutil
import sys
from types import ModuleType
from typing import Any, NoReturn

from torchdevice.core import Context, replaces, supplied_function, thread_state, without_original
from torchdevice.core.bindings import asked
from torchdevice.foundation import data_files
from torchdevice.foundation.fidelity import Fidelity

_TABLE = data_files.read(__file__, "unsupported.json")
POOL = _TABLE["pools"]["remedy"]


def _supply(name: str, remedy: str, family: str) -> None:
    """Let a function of an accelerator, by its dotted name, raise with a remedy."""

    def refuse(context: Context, *args: Any, **kwargs: Any) -> NoReturn:
        named = name.removesuffix(".__init__").removesuffix(".__new__")
        thread_state.refuse(asked(named, sys._getframe(1)), remedy)

    path, _, attribute = name.rpartition(".")
    if path == "torch._C":
        supplied_function(name, Fidelity.UNSUPPORTED, note=remedy, native_to=family)(refuse)
        return
    owner = _found(path)
    # Modules import functions by value; methods are found by their class.
    of_module = isinstance(owner, ModuleType)
    replaces(owner, attribute, native_to=family, optional=True, by_value=of_module)(without_original(refuse))


def _found(dotted: str) -> Any:
    """Return a module or class of torch; None where the installed torch lacks it."""
    try:
        return pkgutil.resolve_name(dotted)
    except AttributeError:
        return None


for _row in _TABLE.values():
    for _name in _row["names"].split():
        _supply(_name, _row["remedy"], _row.get("native_to", "cuda"))
