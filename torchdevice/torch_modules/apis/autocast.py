"""``torch.autocast("cuda")`` and its older spellings.

The program's autocast object enables autocast for cuda, as torch wrote it, so that
``torch.is_autocast_enabled()`` and similar functions report that. With it autocast of the target is
switched on and off, and CUDA's lists of operators (``autocast_lists.py``) where the target has
others.

torch accepts any dtype for cuda; for other devices torch warns of some and leaves autocast off. The
operators that autocast casts make no such difference, so autocast of the target accepts any dtype
too.

The dtype in which the target computes is chosen by :func:`dtype_on_target`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.amp.autocast_mode import autocast

from torchdevice.calls.lacking import float64_policy
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.runtime import HALF
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.thread_values import WhileInside
from torchdevice.torch_modules.apis import autocast_lists

_NO_BACKEND = "privateuseone"
"""The name of the out-of-tree backend where none is registered."""

_COMPANIONS = "_torchdevice_companions"

# The function that enters autocast in Dynamo's graphs. Only torch 2.11 and later make objects of a
# class of their own.
_ENTER_IN_GRAPH = autocast_mode._enter_autocast.__code__

# torch.is_autocast_enabled() without a device asks about torch's accelerator, which is an
# out-of-tree backend where one is registered, even if the target is another device. Before torch
# 2.14 it asks about CUDA.
_ASKS_ABOUT_ACCELERATOR = torch.__version__ >= "2.14"


def dtype_on_target(
    context: Context, requested: torch.dtype, *, enabled: bool = True
) -> torch.dtype:
    """Return an autocast dtype the target has, with finite results wherever CUDA's are finite.

    Raises:
        FidelityError: It is another dtype than the requested one, and the scope is strict.
    """
    fitting = _finite_dtype(context, requested)
    if enabled and fitting is not requested:
        context.report(f"autocast({requested})", str(fitting), Fidelity.DOWNCAST)
    return fitting


def _finite_dtype(context: Context, requested: torch.dtype) -> torch.dtype:
    runtime = context.runtime
    if requested in runtime.unsupported_dtypes:
        return float64_policy.FALLBACKS[requested]
    if requested is torch.bfloat16 and not runtime.supports_bfloat16():
        return torch.float16
    if requested not in HALF or runtime.support.float16_autocast_is_finite:
        return requested
    if context.options.autocast != "auto":
        return getattr(torch, context.options.autocast)
    # bfloat16 has float32's range, but without instructions its products are many times slower.
    return torch.float32 if torch.bfloat16 in runtime.slow_product_dtypes else torch.bfloat16


class _Enabled:
    """Autocast in any dtype. ``torch.autocast`` warns of some, and is slower to make and enter."""

    def __init__(self, device_type: str, dtype: torch.dtype, enabled: bool):
        self._device_type, self._wanted = device_type, (enabled, dtype)
        self._before = self._wanted

    def __enter__(self) -> None:
        self._before = (
            torch.is_autocast_enabled(self._device_type),
            torch.get_autocast_dtype(self._device_type),
        )
        self._set(*self._wanted)

    def __exit__(self, *raised: object) -> None:
        self._set(*self._before)

    def _set(self, enabled: bool, dtype: torch.dtype) -> None:
        torch.set_autocast_enabled(self._device_type, enabled)
        torch.set_autocast_dtype(self._device_type, dtype)


class _Companion(WhileInside):
    """Autocast of other devices, enabled while the program's is entered and in the scope.

    Args:
        context: The context of the thread.
        requested: The program's autocast.
        others: Autocast of the target and of the device that torch asks about, and CUDA's lists of
            operators.
    """

    def __init__(self, context: Context, requested: autocast, others: list[Any]):
        def enter() -> None:
            for other in others:
                other.__enter__()

        def leave() -> None:
            for other in reversed(others):
                other.__exit__(None, None, None)

        super().__init__(
            context.thread, enter, leave, lambda: not torch.is_autocast_enabled(requested.device)
        )

    def _pause(self) -> None:
        super()._pause()
        autocast_lists.clear_cache()


@replaces(autocast, "__enter__", makes=True)
def _enter(original: Any) -> Any:
    @functools.wraps(original)
    def __enter__(self: autocast) -> Any:
        companion = _companion(thread_state.state.context, self)
        result = original(self)
        if companion is not None:
            companion.begin()
        # A list, because an autocast object can be entered again while it is entered.
        self.__dict__.setdefault(_COMPANIONS, []).append(companion)
        return result

    return __enter__


@replaces(autocast, "__exit__", makes=True)
def _exit(original: Any) -> Any:
    @functools.wraps(original)
    def __exit__(self: autocast, exc_type: Any, exc_val: Any, exc_tb: Any) -> Any:
        companions = self.__dict__.get(_COMPANIONS)
        companion = companions.pop() if companions else None
        if companion is not None:
            companion.end()
        return original(self, exc_type, exc_val, exc_tb)

    return __exit__


def _companion(context: Context | None, requested: autocast) -> _Companion | None:
    """Return autocast of other devices; None if the program's suffices or is for another device."""
    # In a graph of Dynamo torch may answer for itself.
    enabled, entered = requested._enabled, thread_state.innermost()
    if entered is not None:
        entered.runtime.supplied.begin_autocast()
    if requested.device == autocast_lists.SPARE:
        of_target = _Enabled(entered.device_type, requested.fast_dtype, enabled)
        return _Companion(
            entered, requested, [of_target, autocast_lists.Region(entered.runtime, enabled)]
        )
    if context is None:
        return None
    device_type = context.device_type
    # A program with torch.autocast(device.type) spells the target, as device was rewritten.
    if requested.device not in (device_type, context.names.family, *context.names.families):
        return None
    dtype = dtype_on_target(context, requested.fast_dtype, enabled=enabled)
    chosen = dict.fromkeys((device_type, context.names.family), dtype)
    if (
        _ASKS_ABOUT_ACCELERATOR
        and (backend := torch._C._get_privateuse1_backend_name()) != _NO_BACKEND
    ):
        chosen.setdefault(backend, requested.fast_dtype)
    if chosen.get(requested.device) is requested.fast_dtype:
        del chosen[requested.device]
    others: list[Any] = [_Enabled(each, dtype, enabled) for each, dtype in chosen.items()]
    if context.runtime.support.autocast_key is not None:
        others.append(autocast_lists.Region(context.runtime, enabled))
    return _Companion(context, requested, others) if others else None


@replaces(autocast, "__init__", makes=True)
def _init_in_graph(original: Any) -> Any:
    """``autocast.__init__``: let autocast of the target be in the dtype that the scope chose.

    A graph of Dynamo makes it so, and a checkpoint, which recomputes in the dtype of the forward
    pass.
    """

    @functools.wraps(original)
    def __init__(
        self: autocast, device_type: Any, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        state = thread_state.state
        context = state.context
        in_graph = sys._getframe(1).f_code is _ENTER_IN_GRAPH and (
            state.compiling or context is not None
        )
        chosen = (in_graph and dtype is not None) or _accepts(context, device_type, dtype)
        # torch accepts float16 on every device; others are refused, or need the properties.
        original(self, device_type, torch.float16 if chosen else dtype, *args, **kwargs)
        if chosen:
            self.fast_dtype = dtype
        if context is None:
            return
        if not chosen and dtype is torch.bfloat16 and self._enabled:
            context.settings[_accepted(context, device_type, dtype)] = True
        if context.shown_as is not None:
            self.custom_backend_name = _NO_BACKEND

    return __init__


def _accepts(context: Context | None, device_type: Any, dtype: Any) -> bool:
    """Return whether a scope accepts a dtype of autocast without torch's check."""
    if context is None:
        return False
    is_known = (
        _accepted(context, device_type, dtype) in context.settings and context.driver.is_initialized
    )
    return is_known or _is_what_is_computed_in(context, device_type, dtype)


def _accepted(context: Context, device_type: Any, dtype: Any) -> tuple[Any, ...]:
    """Return the key of the setting that torch has accepted a dtype on the current device."""
    return "autocast accepts", device_type, dtype, context.thread.device_index


def _is_what_is_computed_in(context: Context, device_type: Any, dtype: Any) -> bool:
    if dtype is not torch.float32 or device_type != context.device_type:
        return False
    return dtype_on_target(context, torch.float16, enabled=False) is torch.float32


@replaces(torch, "clear_autocast_cache")
def _clear_cache(context: Context, original: Any) -> None:
    original()
    autocast_lists.clear_cache()
