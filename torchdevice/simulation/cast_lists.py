"""Autocast on the simulated device: CUDA's lists of operators, read from the header that every torch wheel carries.

Source: ``AT_FORALL_LOWER_PRECISION_FP`` and its neighbours in ATen/autocast_mode.h, from which torch itself registers
CUDA, XPU and other backends. A weight is cast once in an outermost region of autocast, as by ``cached_cast`` of
aten/src/ATen/autocast_mode.cpp, so that its gradient comes through one cast.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._C import DispatchKey

from torchdevice.core import thread_state
from torchdevice.foundation.torch_internals import ExcludeDispatchKeyGuard, require
from torchdevice.simulation.kernels.overloads import overload_of
from torchdevice.simulation.policy import KIND

_KEY = "AutocastPrivateUse1"


_AUTOCAST = torch._C.DispatchKeySet(DispatchKey.AutocastPrivateUse1)


_UNSAFE = """torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.
Many models use a sigmoid layer right before the binary cross entropy layer.
In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits
or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are
safe to autocast."""


def register() -> list[torch.library.Library]:
    """Register the casting kernels with torch. Return the libraries, which unregister their kernels when they end."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(torch.library.fallthrough_kernel, _KEY)
    aten = torch.library.Library("aten", "IMPL")
    policies: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "AT_FORALL_LOWER_PRECISION_FP": _lower_precision,
        "AT_FORALL_FP32": _float32,
        "AT_FORALL_FP32_SET_OPT_DTYPE": _float32_result,
        "AT_FORALL_PROMOTE": _widest,
    }
    for macro, enforcement in policies.items():
        for name in listed(macro):
            aten.impl(name, enforcement(overload_of(name)), _KEY)
    for name in ("norm.Scalar", "norm.ScalarOpt_dim"):
        aten.impl(name, _float32(overload_of(name)), _KEY)
    aten.impl("binary_cross_entropy", _refuse, _KEY)
    return [fallback, aten]


def listed(macro: str) -> Iterator[str]:
    """Yield the operators that a macro of the header lists, by name with overload."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    found = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", header.read_text())
    assert found is not None, f"{header} has no {macro}"
    for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", found[1]):
        if overload != "deprecated":
            yield f"{name}.{overload}" if overload else name


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == KIND
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _is_eligible(value):
        return _cached_cast(value, dtype) if _is_weight(value, dtype) else value.to(dtype)
    return [_cast(each, dtype) for each in value] if isinstance(value, (list, tuple)) else value


_casts: dict[tuple[int, torch.dtype], tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
"""The ``_cdata`` of a weight and a dtype -> the weight and its cast, until the outermost region of autocast ends."""


_is_cached_tensor = require(torch._C, "_is_cached_tensor")


def clear_cache() -> None:
    """Drop the casts of weights."""
    _casts.clear()


def _is_weight(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch caches the cast of a tensor: of a leaf in float32 that requires a gradient.

    Outside of a scope on the device nothing tells where a region of autocast ends, so nothing is cached there.
    """
    context = thread_state.state.context
    return (
        value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and dtype is torch.get_autocast_dtype(KIND)
        and dtype is not torch.float32
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
        and context is not None
        and context.device_type == KIND
        and not _is_cached_tensor(value)
    )


def _cached_cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    key = (weight._cdata, dtype)
    known, cast = _casts.get(key, (None, None))
    if cast is None or known is None or known() is not weight:
        cast = weight.to(dtype)
        _casts[key] = (weakref.ref(weight), cast)
    return cast


def _casting(op: Any, dtype_of: Callable[[Any, Any], torch.dtype | None]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), ExcludeDispatchKeyGuard(_AUTOCAST):
            dtype = dtype_of(args, kwargs)
            if dtype is not None:
                args = tuple(_cast(value, dtype) for value in args)
                kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return op(*args, **kwargs)

    return kernel


def _lower_precision(op: Any) -> Callable[..., Any]:
    return _casting(op, lambda args, kwargs: torch.get_autocast_dtype(KIND))


def _float32(op: Any) -> Callable[..., Any]:
    return _casting(op, lambda args, kwargs: torch.float32)


def _widest(op: Any) -> Callable[..., Any]:
    """Return a kernel that casts arguments of different dtypes to the widest: float32, or autocast's dtype."""

    def dtype_of(args: Any, kwargs: Any) -> torch.dtype | None:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        dtypes = {value.dtype for value in leaves if _is_eligible(value)}
        if len(dtypes) < 2:
            return None
        return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(KIND)

    return _casting(op, dtype_of)


def _float32_result(op: Any) -> Callable[..., Any]:
    """Return a kernel for an operator with a ``dtype`` argument: float32 where the program gives none."""
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), ExcludeDispatchKeyGuard(_AUTOCAST):
            given = args[position] if len(args) > position else kwargs.get("dtype")
            if given is None and args and _is_eligible(args[0]):
                args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(_UNSAFE)
