"""A remedy for the other project named ``torchdevice`` on PyPI, if it was installed over this one.

Its package has the same name, so its ``torchdevice/__init__.py`` replaces this package's.
Everything else of this package stays, and torch must be importable all the same. That project has a
file ``cuda.py``, before which Python finds this folder.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, NoReturn

NAME = "set_cuda_visible_devices"
"""The name that the other project's package imports from ``torchdevice.cuda``."""

REMEDY = (
    "pip uninstall torchdevice, then pip install --force-reinstall --no-deps torchdevice-portable"
)


def explain() -> None:
    """Let ``torchdevice.portable`` and the like raise an error that names the cause."""
    sys.modules["torchdevice"].__getattr__ = _missing  # type: ignore[method-assign]


def refuse(*args: object, **kwargs: object) -> NoReturn:
    """Stand for the other project's function.

    Raises:
        ImportError: Always.
    """
    _missing(NAME)


def _missing(name: str) -> NoReturn:
    if name.startswith("__") or importlib.util.find_spec(f"torchdevice.{name}") is not None:
        raise AttributeError(f"module 'torchdevice' has no attribute {name!r}")
    # Not an AttributeError, whose text `from torchdevice import portable` would drop.
    raise ImportError(
        f"torchdevice.{name} is not there: the projects torchdevice and torchdevice-portable are "
        f"both installed, and their packages have one name. To use torchdevice-portable: {REMEDY}."
    )


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    explain()
    return refuse
