"""The legacy tensor types, such as ``torch.cuda.FloatTensor``.

In a build without CUDA torch's own types only raise. Threads in a scope see stand-in classes
instead: calling one makes a tensor on the target, and ``isinstance`` tests for a tensor of its
dtype and layout on the target.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from torchdevice.calls import moves
from torchdevice.calls.rewriters import convert, move, rewrites, to_host
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces, supplied_value
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_strings import LEGACY_DTYPES, legacy_dtype
from torchdevice.kernel.patching import Installation, Replaced, per_context
from torchdevice.kernel.thread_values import WhileInside
from torchdevice.torch_modules.apis.factories import DEFAULT_TYPE

_LEGACY_CONSTRUCTOR = (
    "legacy constructor expects device type: {expected} but device type: {given} was passed"
)


class LegacyTensorType(type):
    """The metaclass of the stand-in classes."""

    __module__, __qualname__ = "torch", "tensortype"  # as torch's own metaclass is shown

    dtype: torch.dtype
    layout: torch.layout
    is_cuda = True  # the attribute of torch's types

    @property
    def is_sparse(cls) -> bool:
        """Whether the tensors of the type are sparse."""
        return cls.layout is torch.sparse_coo

    def answer(cls, context: Context) -> LegacyTensorType:
        """Return the class, which makes tensors of its dtype on the target."""
        return cls

    def __instancecheck__(cls, instance: object) -> bool:
        context = thread_state.state.context
        return (
            context is not None
            and isinstance(instance, torch.Tensor)
            and instance.dtype is cls.dtype
            and instance.layout is cls.layout
            # With `identity="program"` tensors report cuda.
            and (instance.device.type == "cuda" or context.devices.is_targets(instance.device))
        )

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        context = thread_state.state.context
        if context is None:
            name = f"{cls.__module__}.{cls.__name__}"
            raise TypeError(
                f"{name} makes tensors in a scope only. Call it in torchdevice.portable()."
            )
        device = kwargs.pop("device", None)
        on_target = context.devices.current if device is None else context.redirect(device)
        if on_target is None:
            raise RuntimeError(
                _LEGACY_CONSTRUCTOR.format(expected="cuda", given=torch.device(device).type)
            )
        cpu_type = getattr(torch.sparse if cls.is_sparse else torch, cls.__name__)
        # Made on the CPU by torch's own constructor, whose arguments are many.
        return torch.Tensor.to(cpu_type(*args, **kwargs), on_target)


STAND_INS = {
    f"{module}.{name}": LegacyTensorType(
        name, (), {"dtype": dtype, "layout": layout, "__module__": module}
    )
    for module, layout in (("torch.cuda", torch.strided), ("torch.cuda.sparse", torch.sparse_coo))
    for name, dtype in LEGACY_DTYPES.items()
    if hasattr(importlib.import_module(module), name)
}


for _name, _class in STAND_INS.items():
    supplied_value(_name)(_class.answer)


@replaces(torch._C, "_set_default_tensor_type")
def _set_default_tensor_type(context: Context, original: Any, kind: Any) -> None:
    dtype = legacy_dtype(kind, context.names.families)
    if dtype is not None:
        torch.set_default_dtype(dtype)
        torch.set_default_device(context.devices.current)
        found = context.settings.setdefault(DEFAULT_TYPE, _DefaultType(context))
        found.end()  # perhaps it is in force already
        found.begin()
        return
    if DEFAULT_TYPE in context.settings:
        context.settings.pop(DEFAULT_TYPE).end()
        torch.set_default_device(None)
    original(kind)


class _DefaultType(WhileInside):
    """A CUDA type as the default: factories and ``torch.Tensor(...)`` make target tensors.

    Of the constructors of tensors only ``torch.Tensor`` goes by the default type. It is replaced
    while there is such a default in a scope, because it is not a torch function that a mode sees.
    """

    def __init__(self, context: Context):
        hold = functools.partial(_CONSTRUCTOR.hold, self)
        drop = functools.partial(_CONSTRUCTOR.drop, self)
        # The program may set another default type in another thread.
        super().__init__(
            context.thread, hold, drop, lambda: context.settings.get(DEFAULT_TYPE) is not self
        )


def _new_tensor(
    context: Context,
    original: Any,
    cls: type[torch.Tensor],
    *args: Any,
    device: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """``torch.Tensor(...)``: on the target, unless it wraps an existing tensor or storage."""
    given = args[0] if args else kwargs.get("data")
    has_place = isinstance(given, (torch.Tensor, torch.UntypedStorage, torch.TypedStorage))
    if DEFAULT_TYPE not in context.settings or has_place or not _NAMES_OF_PLACED.isdisjoint(kwargs):
        if device is None:
            return original(cls, *args, **kwargs)
        return original(cls, *args, device=device, **kwargs)
    if device is None:
        target = context.devices.current
    else:
        target = context.redirect(device) or torch.device(device)
    if target.type != context.device_type:
        # torch's words
        raise RuntimeError(_LEGACY_CONSTRUCTOR.format(expected=context.program, given=target.type))
    with torch._C.DisableTorchFunctionSubclass():
        made = original(torch.Tensor, *args, **kwargs)
    if context.runtime.shares_host_memory:
        on_target = moves.made_of(context, given, made, moves.Side.DEVICE)
    else:
        on_target = torch.Tensor.to(made, target)
    return on_target if cls is torch.Tensor else torch.Tensor._make_subclass(cls, on_target)


_NAMES_OF_PLACED = frozenset({"other", "storage", "cdata"})
"""Parameters of ``torch.Tensor`` for memory that has a device already."""


def _constructor(original: Any) -> Any:
    return staticmethod(per_context(original, _new_tensor))


_CONSTRUCTOR = Installation(lambda: [Replaced(torch.Tensor, "__new__", _constructor)])


@rewrites(torch.Tensor.type)
def _tensor_type(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.type``: a dtype, a legacy class such as ``torch.cuda.HalfTensor``, or its name."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        return _type_name(context, args[0], func(*args))
    if isinstance(wanted, _TypeName):
        wanted = wanted.requested
    if isinstance(wanted, torch.dtype):
        result = convert(context, func, args, kwargs)
        return moves.followed(args[0], result) if context.runtime.shares_host_memory else result
    dtype = legacy_dtype(wanted, context.names.families)
    if dtype is not None:
        here = f"{context.program}:{context.thread.device_index}"
        return move(context, torch.Tensor.to, (args[0], here), {"dtype": dtype})
    return to_host(context, func, args, kwargs)  # a CPU type


class _TypeName(str):
    """The type name of a tensor with the target's device, equal also to the requested type.

    Programs sort gradients by such names, and would find none of their own. As a key it equals its
    text.

    Attributes:
        requested: The name that the tensor has on the program's accelerator.
    """

    requested: str

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or self.requested == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> Any:
        return str, (str(self),)


def _type_name(context: Context, tensor: torch.Tensor, name: str) -> str:
    """Return the name of a tensor's type, with the device type that tensors report."""
    of_target = "torch." if context.runtime.shares_host_memory else f"torch.{context.device_type}."
    if not name.startswith(of_target):
        return name
    name_on = "torch.{}." + name[len(of_target) :]
    shown = name if context.shown_as is None else name_on.format(context.shown_as)
    if context.shown_as == context.program or torch.compiler.is_compiling():
        return shown
    if context.runtime.shares_host_memory and moves.side_of(tensor) is moves.Side.HOST:
        return shown
    found = _TypeName(shown)
    found.requested = name_on.format(context.program)
    return found
