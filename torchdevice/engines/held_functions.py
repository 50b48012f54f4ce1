"""Whether a program can hold functions of torch from before a scope, which decides what ``engine="auto"`` means.

Wrappers do not reach a function that a closure, a default argument, an object or ``functools.partial`` has held since
before the scope. Only modules that use torch can hold one, so none is held before such a module has been imported.
"""

from __future__ import annotations

import sys
import types
from typing import Literal

from torchdevice.lowlevel import replace_new

_OF_TORCH = ("torch", "torchgen", "functorch", "torchdevice")

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_NAMED = (types.FunctionType, types.BuiltinFunctionType, type)


def engine() -> Literal["mode", "wrap"]:
    """Return what ``engine="auto"`` means for a scope of the whole process that is entered now."""
    return "mode" if may_be_held() or replace_new.refusal() else "wrap"


def may_be_held() -> bool:
    """Return whether a module outside torch uses torch, or ``__main__`` has anything that can hold a function."""
    for key, module in list(sys.modules.items()):
        root = key.partition(".")[0]
        if not isinstance(module, types.ModuleType) or root in _OF_TORCH or root in sys.stdlib_module_names:
            continue
        is_main = key in ("__main__", "__mp_main__")
        if _can_hold(module) if is_main else any(map(_is_of_torch, list(vars(module).values()))):
            return True
    return False


def _is_of_torch(value: object) -> bool:
    """Return whether a value is a module, a class or a function of torch, without a call of the value's own."""
    if type(value) is types.ModuleType:
        name = vars(value).get("__name__")
    elif issubclass(type(value), _NAMED):
        name = value.__module__ or type(getattr(value, "__self__", None)).__module__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def _can_hold(main: types.ModuleType) -> bool:
    """Return whether ``__main__`` defines or keeps anything but modules, plain values and what it has imported."""
    for name, value in list(vars(main).items()):
        named = issubclass(type(value), (*_NAMED, types.ModuleType))
        imported = named and getattr(value, "__module__", None) != "__main__"
        if not (imported or type(value) in _PLAIN or (name.startswith("__") and name.endswith("__"))):
            return True
    return False
