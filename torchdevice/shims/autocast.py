"""``torch.autocast("cuda")`` and its older spellings.

The program's own autocast object works as it is: it records that autocast is on for cuda, which ``is_autocast_enabled``
and the like then answer. Beside it, autocast of the target is entered and left.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.amp.autocast_mode import autocast

from torchdevice._journal import Fidelity
from torchdevice._patching import Patch, Replaced, replaced_function
from torchdevice._spelling import ACCELERATORS

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_COMPANIONS = "_torchdevice_companions"


def _enter(scope: Scope, original: Any, self: autocast) -> Any:
    companion = _companion(scope, self)
    result = original(self)
    if companion is not None:
        companion.__enter__()
    # An autocast object can be entered again while it is entered.
    self.__dict__.setdefault(_COMPANIONS, []).append(companion)
    return result


def _exit(original: Any) -> Any:
    @functools.wraps(original)
    def __exit__(self: autocast, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        companions = self.__dict__.get(_COMPANIONS)
        companion = companions.pop() if companions else None
        if companion is not None:
            companion.__exit__(exc_type, exc_val, exc_tb)
        return original(self, exc_type, exc_val, exc_tb)

    return __exit__


def _companion(scope: Scope, requested: autocast) -> autocast | None:
    """Return autocast of the target, with the dtype that gives finite results where CUDA does."""
    kind = scope.runtime.kind
    dtype = scope.runtime.autocast_dtype(requested.fast_dtype)
    if requested.device == kind:
        # Programs also write torch.autocast(device.type), with the device they got for "cuda".
        if dtype is requested.fast_dtype:
            return None
    elif requested.device not in ACCELERATORS:
        return None
    if requested._enabled and dtype is not requested.fast_dtype:
        scope.report(f"autocast({requested.fast_dtype})", str(dtype), Fidelity.APPROXIMATE)
    return autocast(kind, dtype=dtype, enabled=requested._enabled, cache_enabled=requested._cache_enabled)


def patches() -> list[Patch]:
    """Return the patches of ``torch.autocast``."""
    return [replaced_function(autocast, "__enter__", _enter), Replaced(autocast, "__exit__", _exit)]
