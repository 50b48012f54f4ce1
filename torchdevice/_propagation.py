"""How a scope reaches processes that do not inherit it by fork: through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchdevice import _target

if TYPE_CHECKING:
    from torchdevice._scope import Scope

SWITCH = "TORCHDEVICE"
_DEVICES = "TORCHDEVICE_DEVICES"
_STRICT = "TORCHDEVICE_STRICT"
_IDENTITY = "TORCHDEVICE_IDENTITY"
_MEMORY = "TORCHDEVICE_MEMORY"
_OFF = ("", "0", "false", "no", "off")


def to_children(scope: Scope) -> dict[str, str | None]:
    """Set the environment so that Python processes started from now on activate a scope like this one.

    Returns:
        The values before, for :func:`restore`; None for a variable that was not set.
    """
    values: dict[str, str | None] = {
        SWITCH: "1",
        _target.VARIABLE: scope.runtime.target,
        _IDENTITY: scope.identity if scope.identity != "target" else None,
        _MEMORY: str(scope.memory) if scope.memory else None,
        _DEVICES: str(scope.advertised_devices) if scope.advertised_devices else None,
        _STRICT: "1" if scope.strict else None,
    }
    before = {name: os.environ.get(name) for name in values}
    restore(values)
    return before


def restore(environment: Mapping[str, str | None]) -> None:
    """Set variables, or delete those that are None."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def from_parent() -> dict[str, Any] | None:
    """Return the options of the scope that the environment asks for, or None if it asks for none."""
    if _is_off(SWITCH):
        return None
    return {
        "devices": _number(_DEVICES, "of devices"),
        "identity": os.environ.get(_IDENTITY) or "target",
        "memory": _number(_MEMORY, "of bytes"),
        "strict": not _is_off(_STRICT),
    }


def _number(variable: str, of_what: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdigit():
        raise ValueError(f"{variable}={text!r} is not a number {of_what}. Use a number of 1 or more, or unset it.")
    return int(text) if text else None


def _is_off(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in _OFF
