"""Makes dataclasses again of the plain data that ``dataclasses.asdict`` gave and that JSON held."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any


def record(cls: type, data: Any) -> Any:
    """Return the object of a dataclass whose fields these data are. Data of other names are left out.

    Raises:
        KeyError: A field is missing.
        TypeError: Something else stands where a record should be.
    """
    kinds = typing.get_type_hints(cls)
    return cls(**{each.name: _value(kinds[each.name], data[each.name]) for each in dataclasses.fields(cls)})


def _value(kind: Any, data: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # such as ``Site | None``
        return None if data is None else _value(inner[0], data)
    if origin in (list, tuple):
        return origin(_value(inner[0], each) for each in data)
    if dataclasses.is_dataclass(kind):
        return record(kind, data)  # type: ignore[arg-type]
    return kind(data) if isinstance(kind, enum.EnumMeta) else data
