"""What ``torch.mps`` and ``torch.backends.mps`` keep for the process, and the class of their streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchdevice._patching import Patch, replaced_function
from torchdevice.bindings import mps

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_FAMILY = "mps"


class MpsStreamStandIn:
    """A stream of a program written for MPS: a name for an order that is kept anyway."""

    __class__ = property(lambda self: torch.mps.Stream)  # type: ignore[assignment]

    def __init__(self, scope: Scope, stream_id: int):
        self._scope = scope
        self.stream_id = stream_id

    def synchronize(self) -> None:
        """Wait for the work."""
        mps.device_synchronize(self._scope)

    def query(self) -> bool:
        """Return whether the work is done."""
        return self._scope.runtime.mark(self._scope.target.index or 0, timing=False).query()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.mps.Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<torch.mps.Stream stream_id={self.stream_id}>"


_next_id = iter(range(1, 1 << 62)).__next__


def _new_stream(scope: Scope, original: Any, cls: type, *args: Any, stream_id: int | None = None) -> Any:
    return MpsStreamStandIn(scope, _next_id() if stream_id is None else stream_id)


def _delete_event(scope: Scope, original: Any, self: torch.mps.Event) -> None:
    mps.release_event(scope, vars(self).get("_Event__eventId", 0))


def _default_generator(scope: Scope, original: Any) -> torch.Generator:
    return mps.get_default_generator(scope)


def _is_available(scope: Scope, original: Any) -> bool:
    return mps.is_available(scope)


def _is_macos_or_newer(scope: Scope, original: Any, major: int, minor: int) -> bool:
    return torch._C._mps_is_on_macos_or_newer(major, minor)


def _is_macos13_or_newer(scope: Scope, original: Any, minor: int = 0) -> bool:
    return torch._C._mps_is_on_macos_or_newer(13, minor)


def _get_name(scope: Scope, original: Any) -> str:
    return mps.get_name(scope)


def _get_core_count(scope: Scope, original: Any) -> int:
    return mps.get_core_count(scope)


def patches() -> list[Patch]:
    """Return the patches: torch keeps the answers of ``torch.backends.mps``, and MPS's generator, for good."""
    kept: dict[str, Callable[..., Any]] = {
        "is_available": _is_available,
        "is_macos_or_newer": _is_macos_or_newer,
        "is_macos13_or_newer": _is_macos13_or_newer,
        "get_name": _get_name,
        "get_core_count": _get_core_count,
    }
    found: list[Patch] = [
        replaced_function(torch.backends.mps, name, replacement, family=_FAMILY)
        for name, replacement in kept.items()
        if hasattr(torch.backends.mps, name)
    ]
    found.append(replaced_function(torch.mps.Event, "__del__", _delete_event, family=_FAMILY))
    found.append(replaced_function(torch.mps, "_get_default_mps_generator", _default_generator, family=_FAMILY))
    if hasattr(torch.mps, "Stream"):  # torch 2.14 and later
        found.append(replaced_function(torch.mps.Stream, "__new__", _new_stream, family=_FAMILY))
    return found
