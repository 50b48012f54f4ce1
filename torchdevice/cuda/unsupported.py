"""Names without an equivalent on a stand-in device, such as raw pointers and allocators. Each raises with a remedy.

``unsupported.json`` lists them: names of ``torch._C``, which are supplied, and functions of torch's Python.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

from torchdevice.core import thread_state
from torchdevice.core.bindings import asked, replaces, supplied_function
from torchdevice.core.context import Context
from torchdevice.core.patching import without_original
from torchdevice.foundation import data_files
from torchdevice.foundation.fidelity import Fidelity

_TABLE = data_files.read(__file__, "unsupported.json")
POOL = _TABLE["pools"]["remedy"]


def _rows() -> Iterator[tuple[str, str, str]]:
    """Yield the dotted name of each function, its remedy, and the accelerator to which it belongs."""
    for row in _TABLE.values():
        for name in row["names"].split():
            yield name, row["remedy"], row.get("native_to", "cuda")


def _refusing(name: str, remedy: str) -> Callable[..., NoReturn]:
    def refuse(context: Context, *args: Any, **kwargs: Any) -> NoReturn:
        named = name.removesuffix(".__init__").removesuffix(".__new__")
        thread_state.refuse(asked(named, sys._getframe(1)), remedy)

    return refuse


def _found(dotted: str) -> Any:
    """Return a module or class of torch; None where the installed torch lacks it."""
    try:
        return pkgutil.resolve_name(dotted)
    except AttributeError:
        return None


for _name, _remedy, _family in _rows():
    _refuse = _refusing(_name, _remedy)
    _path, _, _attribute = _name.rpartition(".")
    if _path == "torch._C":
        supplied_function(_name, Fidelity.UNSUPPORTED, note=_remedy, native_to=_family)(_refuse)
    else:
        _owner = _found(_path)
        # Modules import functions by value; methods are found by their class.
        _of_module = isinstance(_owner, ModuleType)
        replaces(_owner, _attribute, native_to=_family, optional=True, by_value=_of_module)(without_original(_refuse))
