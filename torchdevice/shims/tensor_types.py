"""The legacy tensor types: ``torch.cuda.FloatTensor`` and its family.

torch's own are objects of C that only raise in a build without CUDA. Threads with a scope see stand-in classes instead:
calling one makes a tensor on the target, ``isinstance`` asks for a tensor of that dtype there.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import TYPE_CHECKING, Any

import torch

from torchdevice import _active
from torchdevice._patching import Patch, Replaced
from torchdevice._private import require
from torchdevice.bindings import answers

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_DEFAULT_DEVICE = "default device of a legacy type"
"""Setting: whether a CUDA type is the default, until a CPU type is."""

_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class LegacyTensorType(type):
    """The type of the stand-in classes."""

    dtype: torch.dtype
    layout: torch.layout
    is_cuda = True

    @property
    def is_sparse(cls) -> bool:
        """Whether its tensors are sparse."""
        return cls.layout is torch.sparse_coo

    def answer(cls, scope: Scope) -> LegacyTensorType:
        """The class itself, as the value of its name in a scope."""
        return cls

    def __instancecheck__(cls, instance: object) -> bool:
        scope = _active.current()
        return (
            scope is not None
            and isinstance(instance, torch.Tensor)
            and instance.dtype is cls.dtype
            and instance.layout is cls.layout
            and instance.device.type in (scope.runtime.kind, "cuda")
        )

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        scope = _active.current()
        if scope is None:
            raise TypeError(f"type torch.cuda.{cls.__name__} not available outside a torchdevice scope.")
        kwargs.pop("device", None)
        cpu_type = getattr(torch.sparse if cls.is_sparse else torch, cls.__name__)
        return torch.Tensor.to(cpu_type(*args, **kwargs), scope.target)


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
    for name, dtype in _DTYPES.items()
    if hasattr(importlib.import_module(module), name)
}

for _name, _class in STAND_INS.items():
    answers(_name)(_class.answer)

_NAME = re.compile(r"torch\.(?:cuda|xpu|mps)\.(?:sparse\.)?(\w+)")


def dtype_of(wanted: Any) -> torch.dtype | None:
    """Return the dtype of a stand-in class, of torch's own CUDA type, or of the dotted name of one; else None."""
    if isinstance(wanted, LegacyTensorType):
        return wanted.dtype
    name = (
        wanted if isinstance(wanted, str) else f"{getattr(wanted, '__module__', '')}.{getattr(wanted, '__name__', '')}"
    )
    match = _NAME.fullmatch(name)
    return _DTYPES.get(match[1]) if match else None


def _set_default_tensor_type(original: Any) -> Any:
    @functools.wraps(original)
    def set_default_tensor_type(kind: Any) -> None:
        scope = _active.current()
        dtype = dtype_of(kind) if scope is not None else None
        if scope is None or dtype is None:
            if scope is not None and scope.settings.pop(_DEFAULT_DEVICE, False):
                torch.set_default_device(None)
            return original(kind)
        torch.set_default_dtype(dtype)
        if not scope.runtime.shares_host_memory:
            scope.settings[_DEFAULT_DEVICE] = True
            torch.set_default_device(scope.target)

    return set_default_tensor_type


def patches() -> list[Patch]:
    """Return the patches of the legacy types."""
    require(torch._C, "_set_default_tensor_type")
    return [Replaced(torch._C, "_set_default_tensor_type", _set_default_tensor_type)]
