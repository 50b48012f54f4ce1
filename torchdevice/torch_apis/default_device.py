"""``torch.set_default_device`` in a scope: the default device that it sets ends when the thread leaves the scope."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.core.bindings import replaces
from torchdevice.core.context import Context

DEFAULT_TYPE = "default tensor type"
"""Setting: the legacy tensor type that is the default, until one of the CPU's is; see ``legacy_types``."""


def _default() -> torch.device | None:
    """Return the default device that was set in this thread, or None if none was."""
    present = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if present is None else present.device


class _Stay:
    """Exchanges the default devices outside and inside a scope whenever the thread leaves the scope or returns.

    A thread also leaves a scope between two steps of a decorated generator.
    """

    def __init__(self, context: Context, original: Any):
        self._thread, self._set = context.thread, original
        self._outside: torch.device | None = _default()
        self._inside: torch.device | None = None

    def begin(self) -> None:
        self._thread.at_exit.append(self._leave)

    def _leave(self) -> None:
        self._inside = _default()
        self._set(self._outside)
        self._thread.at_return.append(self._return)

    def _return(self) -> None:
        self._outside = _default()
        self._set(self._inside)
        self.begin()


@replaces(torch, "set_default_device")
def _set_default_device(context: Context, original: Any, device: Any) -> None:
    """``torch.set_default_device``: the first call in a scope remembers the default device to restore."""
    thread = context.thread
    # at_exit holds bound methods, whose __self__ shows whether a _Stay is waiting already.
    if not any(isinstance(getattr(each, "__self__", None), _Stay) for each in thread.at_exit):
        _Stay(context, original).begin()
    if device is None and DEFAULT_TYPE in context.settings:
        device = context.target  # where factories then make tensors is what the default type says
    original(device)
