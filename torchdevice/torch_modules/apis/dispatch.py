"""A program's additions to torch's dispatcher: kernels, tensor subclasses, dispatch modes.

The mode is put back while torch runs the program's own kernels, for ``torch/library.py``. A kernel
for the program's accelerator also serves the target, in scopes: it is put in front of the target's.
On a CPU target the kernel is called before a default kernel; an operator that has a kernel for the
CPU keeps that one.

A wrapper around a tensor of the program is made for that tensor's device. Where tensors report the
program's accelerator, torch would be asked for a wrapper on that accelerator, which is not there.
In a graph that ``make_fx`` or ``torch.export`` traces, devices are spelled as the program's tensors
report them.

torch calls a program's own dispatch modes while the mode is off. Their calls are rewritten, and
their arguments name the devices that the program's tensors report. For
``torch/utils/_python_dispatch.py``.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchdevice.calls.mode import of_this_thread, with_mode
from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import per_context
from torchdevice.kernel.torch_internals import is_torch_function_all_disabled

_AUTOGRAD = ("", "Autograd")
"""Prefixes of dispatch keys."""


def _key_of(device_type: str) -> str:
    """Return the dispatch key of a device type."""
    key = device_type.upper()
    return key if hasattr(torch._C.DispatchKey, key) else "PrivateUse1"


_libraries: weakref.WeakKeyDictionary[torch.library.Library, dict[tuple[str, str], Any]] = (
    weakref.WeakKeyDictionary()
)
"""Those with kernels for a program's accelerator -> the kernels, by prefix and operator."""


@replaces(torch.library.Library, "impl")
def _impl(
    context: Context,
    original: Any,
    self: Any,
    op_name: Any,
    fn: Any,
    dispatch_key: str = "",
    **options: Any,
) -> None:
    """``Library.impl``: register a kernel that runs with the mode of the calling scope."""
    # A kernel of torch's stays as it is.
    if isinstance(fn, types.FunctionType) and not _is_torchs(fn):
        kernel = per_context(fn, with_mode)
    else:
        kernel = fn
    original(self, op_name, kernel, dispatch_key, **options)
    key = dispatch_key or self.dispatch_key
    prefix, _, rest = key.partition(_key_of(context.options.written_for))
    if key != prefix and not rest and prefix in _AUTOGRAD and not _is_torchs(fn):
        name = op_name if isinstance(op_name, str) else op_name.name()
        qualified = name if "::" in name else f"{self.ns}::{name}"
        _libraries.setdefault(self, {})[prefix, qualified] = (
            kernel,
            options.get("with_keyset", False),
        )
    put(context)


@replaces(torch._ops, "key_extractor", makes=True)
def _without_front(original: Any) -> Any:
    """Keep higher-order operators, whose kernels Python finds, from looking for one in front."""

    @functools.wraps(original)
    def key_extractor(tensors: Any, key_mask: Any) -> Any:
        return original(tensors, key_mask - registered_kernels.OF_FRONT)

    return key_extractor


def serves(op: Any) -> bool:
    """Return whether an operator has a kernel of the program's for its accelerator."""
    names = (name for kernels in _libraries.values() for _, name in kernels)
    return op.name() in {name.removesuffix(".default") for name in names}


def put(context: Context) -> None:
    """Let the program's kernels for its accelerator serve a context's target. Repeatable."""
    if not _libraries or context.names.is_native:
        return  # few programs have such kernels
    key = _key_of(context.device_type)
    for kernels in list(_libraries.values()):
        for prefix, name in list(kernels):
            kernel = functools.partial(_stand_in, prefix, name, key)
            registered_kernels.put_in_front(name, prefix + key, kernel, "kernels of the program's")


def _stand_in(
    prefix: str,
    name: str,
    key: str,
    keys: Any,
    own: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the kernel for the program's accelerator in a scope with this key; else the target's."""
    context = thread_state.state.context
    if context is None or context.names.is_native or _key_of(context.device_type) != key:
        return own(*args, **kwargs)
    kernel, with_keyset = _kernel(prefix, name)
    has_own = key == "CPU" and torch._C._dispatch_has_kernel_for_dispatch_key(name, prefix + key)
    if kernel is None or has_own:
        return own(*args, **kwargs)
    return kernel(keys, *args, **kwargs) if with_keyset else kernel(*args, **kwargs)


def _kernel(prefix: str, name: str) -> tuple[Any, bool]:
    """Return an operator's last kernel among live libraries, and whether it takes dispatch keys."""
    found: tuple[Any, bool] = None, False
    for library, kernels in list(_libraries.items()):
        if library.m is not None:
            found = kernels.get((prefix, name), found)
    return found


def _is_torchs(kernel: Any) -> bool:
    """Return whether a kernel is torch's own, which serves only the device it is written for."""
    module = getattr(kernel, "__module__", None) or ""
    return module.startswith("torch.") and module not in _AROUND_KERNELS


_AROUND_KERNELS = frozenset({"torch.library", "torch._library.custom_ops", "torch._library.triton"})
"""Modules whose functions call a kernel of the program that was given to ``register_kernel`` or
``triton_op``.
"""


_NAMES = frozenset({"device", "device_for_backend_keys", "fake_device", "_fake_device"})


@replaces(torch.Tensor, "_make_wrapper_subclass", makes=True)
@replaces(FakeTensor, "__new__", makes=True)
def _on_target(original: Callable[..., Any]) -> Any:
    """Return a static method whose device arguments are replaced by the target's device."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        context = thread_state.state.context
        if context is None:
            return original(*args, **kwargs)
        args = tuple(
            _redirected(context, value) if isinstance(value, torch.device) else value
            for value in args
        )
        for name in kwargs.keys() & _NAMES:
            kwargs[name] = _redirected(context, kwargs[name])
        return original(*args, **kwargs)

    return staticmethod(function)


def _redirected(context: Context, device: Any) -> Any:
    return device if device is None else context.redirect(device) or device


@replaces(MetaTensorDescriber, "describe_tensor")
def _describe(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The parts of a fake tensor: the device that the tensor is on."""
    with torch._C.DisableTorchFunction():
        return original(*args, **kwargs)


@replaces(PythonKeyTracer, "create_arg")
def _argument(context: Context, original: Any, self: Any, value: Any) -> Any:
    """The stand-in of an argument in a graph."""
    found = original(self, value)
    return context.devices.shown(found) if isinstance(found, torch.device) else found


@replaces(FakeTensor, "device", makes=True)
def _device_property(original: Any) -> property:
    """Replace ``FakeTensor.device``: it shows the program's device wherever tensors do."""

    def device(tensor: Any) -> torch.device:
        found: torch.device = original.__get__(tensor)
        context = thread_state.state.context
        shows = (
            context is not None
            and context.shown_as is not None
            and not is_torch_function_all_disabled()
        )
        if context is not None and shows and of_this_thread() is not None:
            return context.devices.shown(found)
        return found

    return property(device, original.__set__)


# Before torch 2.13 it is an attribute of each tensor.
@replaces(FakeTensor, "fake_device", makes=True, optional=True)
def _fake_device_property(original: Any) -> property:
    """Replace ``FakeTensor.fake_device``: programs see ``device``'s answer, torch the real one."""

    def fake_device(tensor: Any) -> torch.device:
        asks_within_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        found: torch.device = original.__get__(tensor) if asks_within_torch else tensor.device
        return found

    return property(fake_device, original.__set__)


_ATTRIBUTE = "__torch_dispatch__"
"""The attribute of a mode that hides its method while the mode is entered in a scope."""


@replaces(TorchDispatchMode, "__enter__")
def _enter(context: Context, original: Any, self: TorchDispatchMode) -> Any:
    is_of_program = not type(self).__module__.startswith(("torch.", "torchdevice."))
    if is_of_program and _ATTRIBUTE not in vars(self):
        # A method, because torch refuses what is not bound to the mode.
        setattr(
            self,
            _ATTRIBUTE,
            MethodType(functools.partial(_dispatch, getattr(self, _ATTRIBUTE)), self),
        )
    return original(self)


@replaces(TorchDispatchMode, "__exit__")
def _exit(context: Context, original: Any, self: TorchDispatchMode, *raised: Any) -> Any:
    result = original(self, *raised)
    if not self.old_dispatch_mode_flags:  # otherwise the mode is entered once more
        vars(self).pop(_ATTRIBUTE, None)
    return result


def _dispatch(
    own: Any, self: TorchDispatchMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """Call ``__torch_dispatch__`` of a mode of the program's, in the scope of the thread."""
    context = thread_state.state.context
    if context is None:
        return own(func, types, args, kwargs)
    if context.shown_as is not None:
        args, kwargs = pytree.tree_map_only(torch.device, context.devices.shown, (args, kwargs))
    return with_mode(context, own, func, types, args, kwargs)
