"""How a scope reaches processes that do not inherit it by fork: through the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchdevice import _target

if TYPE_CHECKING:
    from torchdevice._scope import Scope

SWITCH = "TORCHDEVICE"
_OFF = ("", "0", "false", "no", "off")


def to_children(scope: Scope) -> dict[str, str | None]:
    """Set the environment so that Python processes started from now on activate a scope like this one.

    Returns:
        The values before, for :func:`restore`; None for a variable that was not set.
    """
    values: dict[str, str | None] = {
        SWITCH: "1",
        _target.VARIABLE: scope.runtime.target,
        "TORCHDEVICE_DEVICES": str(scope.advertised_devices) if scope.advertised_devices else None,
        "TORCHDEVICE_IDENTITY": scope.identity,
        "TORCHDEVICE_STRICT": "1" if scope.strict else None,
        "TORCHDEVICE_FLOAT64": scope.float64,
        "TORCHDEVICE_CAPABILITY": "{}.{}".format(*scope.capability),
        "TORCHDEVICE_MEMORY": str(scope.memory) if scope.memory else None,
        "TORCHDEVICE_PROPERTIES": json.dumps(scope.properties) if scope.properties else None,
        "TORCHDEVICE_WRITTEN_FOR": scope.written_for,
        "TORCHDEVICE_ENGINE": scope.engine,
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
    readers: dict[str, Callable[[str, str], Any]] = {
        "devices": _number,
        "identity": _text,
        "float64": _text,
        "capability": _pair,
        "memory": _number,
        "properties": _fields,
        "written_for": _text,
        "engine": _text,
    }
    options: dict[str, Any] = {"strict": not _is_off("TORCHDEVICE_STRICT")}
    for name, read in readers.items():
        variable = f"TORCHDEVICE_{name.upper()}"
        if text := os.environ.get(variable):
            options[name] = read(variable, text)
    return options


def _text(variable: str, text: str) -> str:
    return text


def _number(variable: str, text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{variable}={text!r} is not a number. Use a number of 1 or more, or unset it.")
    return int(text)


def _pair(variable: str, text: str) -> tuple[int, ...]:
    parts = text.split(".")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise ValueError(f"{variable}={text!r} is not a compute capability. Use two numbers such as 8.0, or unset it.")
    return tuple(map(int, parts))


def _fields(variable: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f'{variable}={text!r} is not JSON. Use an object such as {{"name": "a GPU"}}.') from None


def _is_off(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in _OFF
