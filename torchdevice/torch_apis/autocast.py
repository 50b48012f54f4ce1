"""``torch.autocast("cuda")`` and its older spellings.

The program's own autocast object works as it is: it records that autocast is on for cuda, which ``is_autocast_enabled``
and the like then answer. Beside it, autocast of the target is entered and left. For cuda torch takes any dtype, for
others it warns of some and stays off. The operators that autocast casts know no such difference, so autocast of the
target is given any dtype too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.amp.autocast_mode import autocast

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.patching import Patch, Replaced, replaced_function
from torchdevice.spelling import ACCELERATORS
from torchdevice.torch_internals import require

_COMPANIONS = "_torchdevice_companions"

_InGraph = require(autocast_mode, "_UnmanagedAutocast")


class _Companion:
    """Autocast of the target, on while the program's autocast is, and off while the thread is not in the scope."""

    def __init__(self, context: Context, requested: autocast, own: autocast):
        self._context, self._requested, self._own = context, requested, own

    def enter(self) -> None:
        self._own.__enter__()
        self._context.thread.at_exit.append(self._pause)

    def leave(self) -> None:
        thread = self._context.thread
        if self._pause in thread.at_exit:
            thread.at_exit.remove(self._pause)
            self._own.__exit__(None, None, None)
        elif self._resume in thread.at_return:
            thread.at_return.remove(self._resume)

    def _pause(self) -> None:
        """The thread leaves the scope: for a step of a decorated generator, or for good."""
        self._own.__exit__(None, None, None)
        self._context.thread.at_return.append(self._resume)

    def _resume(self) -> None:
        """The thread is back in the scope. The program's autocast may have ended meanwhile."""
        if torch.is_autocast_enabled(self._requested.device):
            self.enter()


def _enter(context: Context, original: Any, self: autocast) -> Any:
    companion = _companion(context, self)
    result = original(self)
    if companion is not None:
        companion.enter()
    # An autocast object can be entered again while it is entered.
    self.__dict__.setdefault(_COMPANIONS, []).append(companion)
    return result


def _exit(original: Any) -> Any:
    @functools.wraps(original)
    def __exit__(self: autocast, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        companions = self.__dict__.get(_COMPANIONS)
        companion = companions.pop() if companions else None
        if companion is not None:
            companion.leave()
        return original(self, exc_type, exc_val, exc_tb)

    return __exit__


def _companion(context: Context, requested: autocast) -> _Companion | None:
    """Return autocast of the target; None where the program's own is that, or is for another device."""
    device_type, enabled = context.device_type, requested._enabled
    # Programs also write torch.autocast(device.type), with the device they got for "cuda".
    if requested.device != device_type and requested.device not in ACCELERATORS:
        return None
    dtype = context.autocast_dtype(requested.fast_dtype, enabled=enabled)
    if requested.device == device_type and dtype is requested.fast_dtype:
        return None
    return _Companion(context, requested, _of_any_dtype(device_type, dtype, enabled, requested._cache_enabled))


def _of_any_dtype(device_type: str, dtype: Any, enabled: bool, cache_enabled: bool | None) -> autocast:
    made = autocast(device_type, torch.bfloat16, enabled, cache_enabled)
    made.fast_dtype = dtype
    return made


def _init_in_graph(original: Any) -> Any:
    """``autocast.__init__``, where a graph of Dynamo's makes one of the target's, of the dtype chosen in the scope."""

    @functools.wraps(original)
    def __init__(self: autocast, device_type: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        state = thread_state.state
        chosen = type(self) is _InGraph and (state.compiling or state.context is not None)
        original(self, device_type, torch.bfloat16 if chosen else dtype, *args, **kwargs)
        if chosen:
            self.fast_dtype = dtype

    return __init__


def patches() -> list[Patch]:
    """Return the patches of ``torch.autocast``."""
    return [
        replaced_function(autocast, "__enter__", _enter),
        Replaced(autocast, "__exit__", _exit),
        Replaced(autocast, "__init__", _init_in_graph),
    ]
