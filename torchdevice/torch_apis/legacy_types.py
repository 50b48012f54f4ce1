"""The legacy tensor types, such as ``torch.cuda.FloatTensor``.

In a build without CUDA torch's own types only raise. Threads in a scope see stand-in classes instead: calling one makes
a tensor on the target, and ``isinstance`` tests for a tensor of its dtype and layout on the target.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from torchdevice import placement, thread_state
from torchdevice.context import Context
from torchdevice.engines.rewriters import convert, move, rewrites
from torchdevice.patching import Patch, Replaced
from torchdevice.spelling import LEGACY_DTYPES, legacy_dtype
from torchdevice.supplied import supplied_value
from torchdevice.torch_internals import require

_DEFAULT_DEVICE = "default device of a legacy type"
"""The setting that is True while a CUDA type is the default tensor type."""


class LegacyTensorType(type):
    """The metaclass of the stand-in classes."""

    dtype: torch.dtype
    layout: torch.layout
    is_cuda = True

    @property
    def is_sparse(cls) -> bool:
        """Whether the tensors of the type are sparse."""
        return cls.layout is torch.sparse_coo

    def answer(cls, context: Context) -> LegacyTensorType:
        """Return the class, which makes tensors of its dtype on the target."""
        return cls

    def __instancecheck__(cls, instance: object) -> bool:
        context = thread_state.current()
        return (
            context is not None
            and isinstance(instance, torch.Tensor)
            and instance.dtype is cls.dtype
            and instance.layout is cls.layout
            and instance.device.type in (context.device_type, "cuda")
        )

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        context = thread_state.current()
        if context is None:
            raise TypeError(
                f"{cls.__module__}.{cls.__name__} makes tensors in a scope only. Call it in torchdevice.portable()."
            )
        kwargs.pop("device", None)
        cpu_type = getattr(torch.sparse if cls.is_sparse else torch, cls.__name__)
        return torch.Tensor.to(cpu_type(*args, **kwargs), context.target)


def _stand_in(module: str, name: str, dtype: torch.dtype, layout: torch.layout) -> LegacyTensorType:
    members = {
        "dtype": dtype,
        "layout": layout,
        "__module__": module,
        "__doc__": f"A {dtype} tensor on the program's accelerator.",
    }
    return LegacyTensorType(name, (), members)


STAND_INS = {
    f"{module}.{name}": _stand_in(module, name, dtype, layout)
    for module, layout in (("torch.cuda", torch.strided), ("torch.cuda.sparse", torch.sparse_coo))
    for name, dtype in LEGACY_DTYPES.items()
    if hasattr(importlib.import_module(module), name)
}


for _name, _class in STAND_INS.items():
    supplied_value(_name)(_class.answer)


def _set_default_tensor_type(original: Any) -> Any:
    @functools.wraps(original)
    def set_default_tensor_type(kind: Any) -> None:
        context = thread_state.current()
        dtype = legacy_dtype(kind) if context is not None else None
        if context is None or dtype is None:
            if context is not None and context.settings.pop(_DEFAULT_DEVICE, False):
                torch.set_default_device(None)
            return original(kind)
        torch.set_default_dtype(dtype)
        if not context.runtime.shares_host_memory:
            context.settings[_DEFAULT_DEVICE] = True
            torch.set_default_device(context.target)

    return set_default_tensor_type


def patches() -> list[Patch]:
    """Return the patches of the legacy types."""
    require(torch._C, "_set_default_tensor_type")
    return [Replaced(torch._C, "_set_default_tensor_type", _set_default_tensor_type)]


@rewrites(torch.Tensor.type)
def _tensor_type(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.type``: a dtype, a legacy class such as ``torch.cuda.HalfTensor``, or the name of one."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        return _type_name(context, func(*args))
    if isinstance(wanted, torch.dtype):
        result = convert(context, func, args, kwargs)
        return placement.followed(args[0], result) if context.runtime.shares_host_memory else result
    dtype = legacy_dtype(wanted)
    if dtype is not None:
        return move(context, torch.Tensor.to, (args[0], context.current_spelling("cuda")), {"dtype": dtype})
    result = func(*args, **kwargs)  # a CPU type
    if context.runtime.shares_host_memory:
        return placement.moved(context, args[0], result, placement.Side.HOST)
    return result


def _type_name(context: Context, name: str) -> str:
    """Return the name of a tensor type; under ``identity="program"`` with the program's accelerator for the target."""
    of_target = f"torch.{context.device_type}."
    of_program = f"torch.{context.options.written_for}."
    return of_program + name[len(of_target) :] if context.says_program and name.startswith(of_target) else name
