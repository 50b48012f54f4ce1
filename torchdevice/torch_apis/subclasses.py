"""Subclasses of tensors and dispatch modes: what they are given, and the devices that they claim.

A wrapper around a tensor of the program is made for that tensor's device. Where tensors report the program's
accelerator, torch would be asked for a wrapper on that accelerator, which is not there. In a graph that ``make_fx`` or
``torch.export`` traces, devices are spelled as the program's tensors report them.

torch calls a program's own dispatch modes while the mode is off. What they call is rewritten, and what they are given
names the devices that the program's tensors report. For ``torch/utils/_python_dispatch.py``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchdevice.core import Context, replaces, thread_state
from torchdevice.engines.mode import of_this_thread, with_mode
from torchdevice.foundation.torch_internals import is_torch_function_all_disabled

_NAMES = frozenset({"device", "device_for_backend_keys", "fake_device", "_fake_device"})


@replaces(torch.Tensor, "_make_wrapper_subclass", makes=True)
@replaces(FakeTensor, "__new__", makes=True)
def _on_target(original: Callable[..., Any]) -> Any:
    """Return a static method that gets the target's device in place of each device among its arguments."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        context = thread_state.state.context
        if context is None:
            return original(*args, **kwargs)
        args = tuple(_redirected(context, value) if isinstance(value, torch.device) else value for value in args)
        for name in kwargs.keys() & _NAMES:
            kwargs[name] = _redirected(context, kwargs[name])
        return original(*args, **kwargs)

    return staticmethod(function)


def _redirected(context: Context, device: Any) -> Any:
    return device if device is None else context.redirect(device) or device


@replaces(MetaTensorDescriber, "describe_tensor")
def _describe(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """What a fake tensor is made of: the device that the tensor is on."""
    with torch._C.DisableTorchFunction():
        return original(*args, **kwargs)


@replaces(PythonKeyTracer, "create_arg")
def _argument(context: Context, original: Any, self: Any, value: Any) -> Any:
    """What stands for an argument in a graph."""
    found = original(self, value)
    return context.shown(found) if isinstance(found, torch.device) else found


@replaces(FakeTensor, "device", makes=True)
def _device_property(original: Any) -> property:
    """Replace ``FakeTensor.device``: it shows the program's device where that of any other tensor does."""

    def device(tensor: Any) -> torch.device:
        found: torch.device = original.__get__(tensor)
        context = thread_state.state.context
        shows = context is not None and context.shown_as is not None and not is_torch_function_all_disabled()
        return context.shown(found) if context is not None and shows and of_this_thread() is not None else found

    return property(device, original.__set__)


# Before torch 2.13 it is an attribute of each tensor.
@replaces(FakeTensor, "fake_device", makes=True, optional=True)
def _fake_device_property(original: Any) -> property:
    """Replace ``FakeTensor.fake_device``: programs see in it what ``device`` shows, and torch computes with it."""

    def fake_device(tensor: Any) -> torch.device:
        asks_within_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        found: torch.device = original.__get__(tensor) if asks_within_torch else tensor.device
        return found

    return property(fake_device, original.__set__)


_ATTRIBUTE = "__torch_dispatch__"
"""The attribute of a mode that takes the place of its method while the mode is entered in a scope."""


@replaces(TorchDispatchMode, "__enter__")
def _enter(context: Context, original: Any, self: TorchDispatchMode) -> Any:
    if not type(self).__module__.startswith(("torch.", "torchdevice.")) and _ATTRIBUTE not in vars(self):
        # A method, because torch refuses what is not bound to the mode.
        setattr(self, _ATTRIBUTE, MethodType(functools.partial(_dispatch, getattr(self, _ATTRIBUTE)), self))
    return original(self)


@replaces(TorchDispatchMode, "__exit__")
def _exit(context: Context, original: Any, self: TorchDispatchMode, *raised: Any) -> Any:
    result = original(self, *raised)
    if not self.old_dispatch_mode_flags:  # otherwise the mode is entered once more
        vars(self).pop(_ATTRIBUTE, None)
    return result


def _dispatch(own: Any, self: TorchDispatchMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call ``__torch_dispatch__`` of a mode of the program's, in the scope of the thread."""
    context = thread_state.state.context
    if context is None:
        return own(func, types, args, kwargs)
    if context.shown_as is not None:
        args, kwargs = pytree.tree_map_only(torch.device, context.shown, (args, kwargs))
    return with_mode(context, own, func, types, args, kwargs)
