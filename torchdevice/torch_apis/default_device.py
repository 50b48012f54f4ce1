"""``torch.set_default_device`` in a scope: what it sets ends with the thread's stay in the scope."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.patching import Patch, replaced_function
from torchdevice.torch_internals import require

DEFAULT_TYPE = "default tensor type"
"""Setting: the legacy tensor type that is the default, until one of the CPU's is; see ``legacy_types``."""

_contexts = require(torch, "_GLOBAL_DEVICE_CONTEXT")


def _default() -> torch.device | None:
    """Return the default device that was set in this thread, None where none was."""
    present = getattr(_contexts, "device_context", None)
    return None if present is None else present.device


class _Stay:
    """The default devices outside and inside a scope, exchanged as the thread comes and goes.

    A thread leaves a scope also between the steps of a decorated generator.
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


def _set_default_device(context: Context, original: Any, device: Any) -> None:
    """``torch.set_default_device``: the first call in a scope notes what to put back."""
    thread = context.thread
    if not any(isinstance(getattr(each, "__self__", None), _Stay) for each in thread.at_exit):
        _Stay(context, original).begin()
    if device is None and DEFAULT_TYPE in context.settings:
        device = context.target  # where factories then make tensors is what the default type says
    original(device)


def patches() -> list[Patch]:
    """Return the patch of ``torch.set_default_device``."""
    return [replaced_function(torch, "set_default_device", _set_default_device)]
