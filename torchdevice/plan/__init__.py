"""``torchdevice plan`` and ``torchdevice.plan(...)``: how much memory of a GPU a program needs.

May import ``kernel``, ``report``, ``scope``, ``simulation`` and ``torch_modules``.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """This package, which is also the function of its name: ``torchdevice.plan`` means both."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return importlib.import_module("torchdevice.plan.calls").plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
