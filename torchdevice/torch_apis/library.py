"""The program's own kernels of operators, for ``torch/library.py``.

The mode is put back while torch runs them. A kernel for the program's accelerator also serves the target, in scopes:
it is registered for the target's dispatch key too while a scope on that target is active. On a CPU target the kernel is
called before a default kernel; an operator that has a kernel for the CPU keeps that one.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdevice.core import Callback, Context, Installation, per_context, replaces, thread_state
from torchdevice.engines.mode import with_mode
from torchdevice.fallback.fallback_kernels import Registrations

_AUTOGRAD = ("", "Autograd")
"""Prefixes of dispatch keys."""


def _key_of(device_type: str) -> str:
    """Return the dispatch key of a device type."""
    key = device_type.upper()
    return key if hasattr(torch._C.DispatchKey, key) else "PrivateUse1"


_libraries: weakref.WeakKeyDictionary[torch.library.Library, dict[tuple[str, str], Any]] = weakref.WeakKeyDictionary()
"""Those with kernels for a program's accelerator -> the kernels, by prefix and operator."""


@replaces(torch.library.Library, "impl")
def _impl(
    context: Context, original: Any, self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any
) -> None:
    """``Library.impl``: register a kernel that runs with the mode of the scope in which it is called."""
    # A kernel of torch's stays as it is.
    kernel = per_context(fn, with_mode) if isinstance(fn, types.FunctionType) and not _is_torchs(fn) else fn
    target_key = _key_of(context.device_type)
    _remove(target_key)  # what the program registers for the target itself comes before what is registered in its place
    original(self, op_name, kernel, dispatch_key, **options)
    key = dispatch_key or self.dispatch_key
    prefix, _, rest = key.partition(_key_of(context.options.written_for))
    if key != prefix and not rest and prefix in _AUTOGRAD and not _is_torchs(fn):
        name = op_name if isinstance(op_name, str) else op_name.name()
        qualified = name if "::" in name else f"{self.ns}::{name}"
        _libraries.setdefault(self, {})[prefix, qualified] = kernel, options.get("with_keyset", False)
    if not context.is_native:
        _install(target_key)


@functools.cache
def _registrations(key: str) -> tuple[Registrations, ...]:
    """Return what registers the kernels for a target's dispatch key, and for that of its autograd."""
    return tuple(Registrations(prefix + key, functools.partial(_kernels, prefix, key)) for prefix in _AUTOGRAD)


def _kernels(prefix: str, key: str) -> Mapping[str, Callable[..., Any]]:
    """Return the stand-ins for the kernels of libraries that still exist, by the names of their operators."""
    found = {}
    for library, kernels in list(_libraries.items()):
        for (of, name), (kernel, with_keyset) in kernels.items():
            has_own = key == "CPU" and torch._C._dispatch_has_kernel_for_dispatch_key(name, prefix + key)
            if of == prefix and library.m is not None and not has_own:
                found[name] = _stand_in(name, prefix + key, kernel, with_keyset)
    return found


def serves(op: Any) -> bool:
    """Return whether an operator has a kernel of the program's for its accelerator."""
    names = (name for kernels in _libraries.values() for _, name in kernels)
    return op.name() in {name.removesuffix(".default") for name in names}


def _stand_in(name: str, key: str, kernel: Any, with_keyset: bool) -> Callable[..., Any]:
    """Return a kernel for another dispatch key, which leaves threads without a scope the kernel that they would get."""
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, key)
    theirs = torch.library.get_kernel(name, key) if computed else None

    def stand_in(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if thread_state.state.context is None and theirs is not None:
            return theirs.call_boxed(keys, *args, **kwargs)
        return kernel(keys, *args, **kwargs) if with_keyset else kernel(*args, **kwargs)

    return stand_in


@functools.cache
def _installation(key: str) -> Installation:
    return Installation(lambda: [Callback(functools.partial(_install, key), functools.partial(_remove, key))])


def _install(key: str) -> None:
    if _libraries:  # few programs have such kernels
        for each in _registrations(key):
            each.install()


def _remove(key: str) -> None:
    for each in _registrations(key):
        each.remove()


def needed(context: Context) -> list[Installation]:
    """Return the installation that a context needs for its target."""
    return [] if context.is_native else [_installation(_key_of(context.device_type))]


def _is_torchs(kernel: Any) -> bool:
    """Return whether a kernel is torch's own, which serves only the device that it was written for."""
    module = getattr(kernel, "__module__", None) or ""
    return module.startswith("torch.") and module not in _AROUND_KERNELS


_AROUND_KERNELS = frozenset({"torch.library", "torch._library.custom_ops", "torch._library.triton"})
"""Modules whose functions call a kernel of the program that was given to ``register_kernel`` or ``triton_op``."""
