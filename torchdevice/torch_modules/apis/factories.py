"""Factories with a peculiar way of taking a device, and constructors that the mode does not see.

The latter are those of storages, for ``torch/storage.py``, and of generators. Every other factory
is found by its schema, see ``calls/rewriters.py``: a new one of torch needs nothing here. A default
device that ``torch.set_default_device`` sets in a scope ends when the thread leaves the scope.
"""

from __future__ import annotations

import copyreg
import functools
import pkgutil
import sys
from typing import Any

import torch
import torch.utils.dlpack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from torchdevice.calls import lookup, moves
from torchdevice.calls.lacking import float64_policy
from torchdevice.calls.rewriters import rewrites, with_device_keyword
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import REPLACED, replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import (
    Callback,
    ReplacedInImporters,
    per_context,
    subclass_in_place_of,
)
from torchdevice.kernel.thread_values import WhileInside


@replaces(torch.TypedStorage, "__init__")
@replaces(torch, "range")
def with_device(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a constructor with its ``device`` rewritten, and pin only if the target pins."""
    device = kwargs.get("device")
    if device is not None:
        kwargs["device"] = context.redirect(device) or device
    if kwargs.get("pin_memory") and not context.runtime.pins_memory:
        kwargs["pin_memory"] = False
    return original(*args, **kwargs)


@replaces(torch.UntypedStorage, "__new__")
def _untyped_storage(
    context: Context, original: Any, *args: Any, device: Any = None, **kwargs: Any
) -> Any:
    """``torch.UntypedStorage.__new__``: rewrite the device; the runtime makes target storages."""
    if device is None:
        return original(*args, **kwargs)
    device = context.redirect(device) or (
        device if isinstance(device, torch.device) else torch.device(device)
    )
    if device.type == context.device_type:
        return context.runtime.supplied.new_storage(original, *args, device=device, **kwargs)
    return original(*args, device=device, **kwargs)


@replaces(torch.storage, "_get_device_from_module")
def _device_of_module(context: Context, original: Any, module: str) -> str:
    """``_get_device_from_module``: the target, for types such as ``torch.cuda.FloatStorage``."""
    found = original(module)
    device = context.redirect(found)
    if context.shown_as is not None or device is None:
        return found
    # Torch compares it with the type of a storage's device.
    return str(device) if device.index else device.type


_NEEDS_TARGET = frozenset(
    {
        "torch.multiprocessing.reductions",  # chooses how to share the memory
        "torch.serialization",  # chooses the tag in a file
        "torchdevice.torch_modules.apis.serialization",
    }
)
"""Modules that need the device of a storage itself, not the one that the program is shown."""


def _read_device(context: Context, original: Any, storage: Any) -> torch.device:
    """``UntypedStorage.device``: the program's device if ``identity="program"``, as for tensors."""
    device = original(storage)
    if context.shown_as is None or device.type != context.device_type or not rewrites_calls():
        return device
    # Frame 1 is the function that per_context() made.
    caller = sys._getframe(2).f_globals.get("__name__")
    return device if caller in _NEEDS_TARGET else context.devices.shown(device)


def rewrites_calls() -> bool:
    """Return whether torch calls of this thread are rewritten now.

    They are not while the mode handles a call. Then torch itself works on the target and needs the
    target's device.
    """
    stack = _get_current_function_mode_stack()
    if thread_state.state.mode is not None:
        return True
    return any(isinstance(mode, thread_state.ContextMode) for mode in stack)


@replaces(torch.UntypedStorage, "device", makes=True)
def _device_property(original: Any) -> property:
    return property(per_context(original.__get__, _read_device))


@rewrites(torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
def _from_data(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Constructors that take the dtype of their data, and some of them its memory."""
    asked = kwargs.get("device")
    if asked is None:
        return with_device_keyword(context, func, args, kwargs)
    if context.dtypes.unsupported and kwargs.get("dtype") is None:
        is_leaf = kwargs.pop("requires_grad", False)
        on_cpu = func(*args, **{**kwargs, "device": "cpu"})
        made = float64_policy.place(context, on_cpu, torch.device(context.redirect(asked) or asked))
        return made.requires_grad_() if is_leaf else made
    if not context.runtime.shares_host_memory or func not in _MAY_SHARE:
        return with_device_keyword(context, func, args, kwargs)
    target = context.redirect(asked)
    result = func(*args, **{**kwargs, "device": target or asked})
    source = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    return moves.made_of(context, source, result, moves.side_meant(context, asked, target))


_MAY_SHARE = frozenset({torch.as_tensor, torch.asarray})
"""Constructors that share the memory of data that is on the device already."""


@replaces(DeviceContext, "__torch_function__")
def _inject(
    context: Context,
    original: Any,
    self: Any,
    func: Any,
    types: Any,
    args: Any = (),
    kwargs: Any = None,
) -> Any:
    """``DeviceContext.__torch_function__``: rewrite the device added to calls unseen by a mode."""
    kwargs = kwargs or {}
    if rewrites_calls() or kwargs.get("device") is not None or func not in _device_constructors():
        return original(self, func, types, args, kwargs)
    kwargs = {**kwargs, "device": context.redirect(self.device) or self.device}
    rewriter = lookup.rewriter_of(lookup.table_of(context), func)
    if rewriter is None or not (context.runtime.shares_host_memory or context.dtypes.unsupported):
        return original(self, func, types, args, kwargs)
    # A move may have to copy, or a dtype to be replaced.
    return rewriter(context, func, args, kwargs)


@replaces(torch.nested, "nested_tensor", "as_nested_tensor")
@replaces(torch._C._nested, "nested_tensor")  # type: ignore[attr-defined]  # where that was imported by value
def _nested(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``nested_tensor`` and its sibling, unseen by modes: in a dtype that the target has."""
    try:
        return with_device(context, original, *args, **kwargs)
    except TypeError as error:
        if not float64_policy.refused(context, error):
            raise
    return float64_policy.again(
        context, functools.partial(with_device, context, original), args, kwargs
    )


@replaces(torch, "from_dlpack", by_value=True)
def _from_dlpack(
    context: Context, original: Any, ext_tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    """``from_dlpack``: mark the new storage with the side of the source, whose memory it shares."""
    result = original(ext_tensor, *args, **kwargs)
    if not context.runtime.shares_host_memory:
        return result
    with torch._C.DisableTorchFunction():  # no mode of the program sees this
        return moves.shared(ext_tensor, result)


DEFAULT_TYPE = "default tensor type"
"""Setting: the legacy tensor type that is the default, until one of the CPU's is; see
``legacy_types``.
"""


def _default() -> torch.device | None:
    """Return the default device that was set in this thread, or None if none was."""
    present = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if present is None else present.device


class _DefaultDevice(WhileInside):
    """The default device inside a scope, which takes turns with the one outside."""

    def __init__(self, context: Context, original: Any):
        aside = [_default()]

        def exchange() -> None:
            aside.append(_default())
            original(aside.pop(0))

        super().__init__(context.thread, exchange, exchange)


@replaces(torch, "set_default_device")
def _set_default_device(context: Context, original: Any, device: Any) -> None:
    """``torch.set_default_device``: the first call in a scope stores the default to restore."""
    thread = context.thread
    # at_exit holds bound methods, whose __self__ shows whether there is one already.
    if not any(
        isinstance(getattr(each, "__self__", None), _DefaultDevice) for each in thread.at_exit
    ):
        _DefaultDevice(context, original).begin()
    if device is None and DEFAULT_TYPE in context.settings:
        # The default type then decides where factories make tensors.
        device = context.devices.current
    original(device)


_Original = torch.Generator


@functools.wraps(_Original.__new__)
def _new(cls: type, device: Any = "cpu") -> torch.Generator:
    context = thread_state.state.context
    if context is not None:
        asked, target = device, context.redirect(device)
        device = target or torch.device(asked)
        # On a CPU target a generator of the host may have other numbers than one of the device.
        is_hosts = (
            context.runtime.shares_host_memory
            and moves.side_meant(context, asked, target) is moves.Side.HOST
        )
        if device.type == context.device_type and not is_hosts:
            return context.runtime.supplied.generator(
                device.index or 0, _Original if cls is Generator else cls
            )
    return _Original(device) if cls is Generator else _Original.__new__(cls, device)  # type: ignore[call-arg]


Generator = subclass_in_place_of(_Original, _new)


def _reduce(generator: torch.Generator) -> Any:
    """Pickle a generator as torch's class. torch's ``__reduce__`` names ``torch.Generator``."""
    _, *rest = _Original.__reduce__(generator)
    return _Original, *rest


# For subclasses of a program, which torch pickles as torch.Generator.
Generator.__reduce__ = _reduce


def _reduce_class(cls: type) -> Any:
    """Pickle the stand-in class as torch's own, and a program's subclasses by their names."""
    return (pkgutil.resolve_name, ("torch:Generator",)) if cls is Generator else cls.__qualname__


copyreg.dispatch_table[type(Generator)] = _reduce_class  # for good: a program may keep the class


def _register() -> None:
    copyreg.dispatch_table.setdefault(_Original, _reduce)


def _unregister() -> None:
    if copyreg.dispatch_table.get(_Original) is _reduce:
        copyreg.dispatch_table.pop(_Original, None)


REPLACED.extend(
    [ReplacedInImporters(torch, "Generator", lambda _: Generator), Callback(_register, _unregister)]
)
