"""``torch.Generator(device="cuda")``.

The class is replaced by a subclass while a scope is active, so that ``isinstance``, ``torch.Generator | None`` and
subclassing go on working. What it makes are plain generators of torch's own class.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdevice import _active
from torchdevice._patching import Patch, Replaced

_Original = torch.Generator


class _GeneratorType(type(_Original)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Original)


class Generator(_Original, metaclass=_GeneratorType):
    """As ``torch.Generator``, with the device rewritten."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        scope = _active.state.scope
        if scope is not None:
            device = scope.redirect(device) or device
        if cls is Generator:
            return _Original(device)
        return super().__new__(cls, device)  # type: ignore[call-arg]


Generator.__name__ = Generator.__qualname__ = "Generator"
Generator.__module__ = _Original.__module__
Generator.__doc__ = _Original.__doc__


def patches() -> list[Patch]:
    """Return the patch of ``torch.Generator``."""
    return [Replaced(torch, "Generator", lambda _: Generator)]
