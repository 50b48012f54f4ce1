"""CUDA's lists of operators for autocast, on devices that torch has other lists for.

Source: ``AT_FORALL_LOWER_PRECISION_FP`` and its neighbours in ATen/autocast_mode.h, which every
torch wheel carries and from which torch itself registers CUDA and XPU. Where a device lacks a
kernel for an operator of the lists, or has one that casts to another dtype, a kernel in Python is
registered:

- for a device without lists, which is the simulated one, under the device's own key;
- for the CPU and MPS under :data:`SPARE`, the key of a device type without other kernels. A
  :class:`Region` adds the key to those of its thread, so that no other thread and no other region
  runs these kernels.

A weight is cast once in an outermost region of autocast, as by ``cached_cast`` of
aten/src/ATen/autocast_mode.cpp, so that its gradient comes through one cast.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.python.per_thread import PerThread
from torchdevice.kernel.registered_kernels import overload
from torchdevice.kernel.torch_internals import registrations_for_dispatch_key

SPARE = "ipu"
"""The device type whose autocast stands for CUDA's lists on the CPU and on MPS, also in graphs of
Dynamo.
"""

_SPARE_KEY = "AutocastIPU"

_CAST_OTHERWISE = frozenset({"binary_cross_entropy", "conv_transpose3d.input", "grid_sampler"})
"""Operators of CUDA's lists for which torch has a kernel for the CPU or MPS that casts to another
dtype than CUDA's.
"""

_KEPT = re.compile(r"cross_entropy_loss|fft_.*|stft.*|view_as_complex|polar")
"""Operators outside CUDA's lists that torch's kernels for autocast of the CPU serve: one whose
results have the same dtypes as without it, and those with complex results, which do not exist in
bfloat16.
"""

_BY_CUDNN = [
    f"{name}.{given}"
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for given in ("input", "data")
]
_BY_CUDNN += ["cudnn_convolution", "cudnn_convolution_transpose"]
"""Operators that CUDA casts besides those of the header: those that it runs by ``_cudnn_rnn``,
which a file of its own casts (aten/src/ATen/cudnn/AutocastRNN.cpp), and cuDNN's convolutions
(aten/src/ATen/autocast_mode.cpp).
"""

_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_set_included = torch._C._dispatch_tls_set_dispatch_key_included
# Not by name, which torch takes long to parse.
_INCLUDED = getattr(torch._C.DispatchKey, _SPARE_KEY)
_is_cached_tensor = torch._C._is_cached_tensor  # type: ignore[attr-defined]
_below_autocast = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)


# ---- regions -------------------------------------------------------------------------------------


_region = PerThread(kind=None)
"""The device type for which a thread uses the lists under the spare key, if any."""


class Region:
    """CUDA's lists for tensors of a device, in this thread while the region is entered.

    Args:
        runtime: The device, which has an ``autocast_key``.
        enabled: Whether autocast is on in the region.
    """

    def __init__(self, runtime: Runtime, enabled: bool):
        self._kind = runtime.device_type if enabled else None
        self._before: str | None = None
        key = runtime.support.autocast_key
        if key not in _served:
            with thread_state.suspended():  # kernels that a program registers run with the mode
                _register_spare(key)
                _served.add(key)

    def __enter__(self) -> None:
        self._before = _region.kind
        _use_for(self._kind)

    def __exit__(self, *raised: object) -> None:
        _use_for(self._before)


def _use_for(kind: str | None) -> None:
    if kind == _region.kind:
        return
    _region.kind = kind
    _set_enabled(SPARE, kind is not None)
    _set_included(_INCLUDED, kind is not None)


# ---- registration --------------------------------------------------------------------------------


def register(kind: str, key: str) -> None:
    """Register kernels for all operators of the lists, for a device that has none."""
    _register(key, {name: _kernel(name, lambda: kind, kind) for name in policies()})


def _register_spare(own_key: Any) -> None:
    """Register kernels for operators that torch casts differently from CUDA under a key."""
    # Libraries such as torchvision register operators of their own there.
    all_own = (name.partition("::") for name in registrations_for_dispatch_key(own_key))
    own = {name for library, _, name in all_own if library == "aten"}
    listed = policies().keys()
    made = {
        name: _kernel(name, lambda: _region.kind, SPARE)
        for name in (listed - own) | _CAST_OTHERWISE
    }
    _register(_SPARE_KEY, {name: made[name] for name in made.keys() - _with_kernel})
    unlisted = [name for name in own - listed - _with_kernel if not _KEPT.fullmatch(name)]
    for name in unlisted:
        kernel = _without_autocast(overload(f"aten::{name}"))
        registered_kernels.put(f"aten::{name}", kernel, _SPARE_KEY, __file__, with_keys=True)
    _with_kernel.update(made, unlisted)


_served: set[str | None] = set()
"""The keys of torch's kernels for devices, beside which there are kernels here: only a region
includes them.
"""

_with_kernel: set[str] = set()
"""The operators with a kernel under the spare key."""


def _register(key: str, kernels: dict[str, Callable[..., Any]]) -> None:
    registered_kernels.put_fallback(torch.library.fallthrough_kernel, key, __file__)
    for name, kernel in kernels.items():
        registered_kernels.put(f"aten::{name}", kernel, key, __file__)


@functools.cache
def policies() -> dict[str, str]:
    """Return CUDA's listed operators by qualified overload, with the header's macro for each."""
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    found = dict.fromkeys(_BY_CUDNN, _LOWER)
    for macro in (_LOWER, _FLOAT32, _FLOAT32_RESULT, _WIDEST):
        lines = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", header)
        assert lines is not None, f"autocast_mode.h has no {macro}"
        for name, variant in re.findall(r"_\((\w+)(?:, (\w+))?\)", lines[1]):
            if variant != "deprecated":
                found[f"{name}.{variant}" if variant else name] = macro
    return {
        **found,
        "norm.Scalar": _FLOAT32,
        "norm.ScalarOpt_dim": _FLOAT32,
        "binary_cross_entropy": _BANNED,
    }


_LOWER, _FLOAT32 = "AT_FORALL_LOWER_PRECISION_FP", "AT_FORALL_FP32"
_FLOAT32_RESULT, _WIDEST = "AT_FORALL_FP32_SET_OPT_DTYPE", "AT_FORALL_PROMOTE"
_BANNED = "banned"


# ---- kernels -------------------------------------------------------------------------------------


def _without_autocast(op: Any) -> Callable[..., Any]:
    """Return a kernel that passes a call on below all keys of autocast."""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys & _below_autocast, *args, **kwargs)

    return kernel


def _kernel(
    name: str, kind_of: Callable[[], str | None], registered_for: str
) -> Callable[..., Any]:
    """Return the kernel of an operator by its policy.

    Args:
        name: The operator, with overload.
        kind_of: Returns the type of the devices whose tensors are cast, None for no tensors.
        registered_for: The type of the devices whose autocast is on wherever the kernel is called.
    """
    policy, op = policies()[name], overload(f"aten::{name}")
    if policy == _BANNED:
        return _refuse
    if policy == _FLOAT32_RESULT:
        fit = _float32_result(op)
    elif policy == _WIDEST:
        fit = _casting(op, _widest if registered_for == SPARE else _promoted)
    else:
        fit = _casting(op, _DTYPES.get(policy))
    no_function = torch._C.DisableTorchFunction
    otherwise = name in _CAST_OTHERWISE
    call = _caller(op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        kind: Any = kind_of()
        # Not within torch's own kernels for autocast.
        is_on = kind is not None and _is_enabled(kind)
        with no_function():
            if is_on or (otherwise and kind is not None):
                args = fit(kind, args, kwargs)
            # Not ExcludeDispatchKeyGuard, which takes longer than all else here. After an interrupt
            # at any line autocast is on, as before: each `finally` makes its first call.
            try:
                try:
                    _set_enabled(registered_for, False)
                    if is_on:
                        _set_enabled(kind, False)
                    return call(*args, **kwargs)
                finally:
                    _set_enabled(registered_for, True)
            finally:
                if is_on:
                    _set_enabled(kind, True)

    return kernel


def _caller(op: Any) -> Callable[..., Any]:
    """Return a function that calls an operator with the dispatcher's arguments but for defaults.

    The defaults of the schema are meant. A function of Python may have others (the reduction of
    losses), or stand for several overloads, and takes less time. It is called where there are no
    defaults.
    """
    has_defaults = any(argument.has_default_value() for argument in op._schema.arguments)
    named = getattr(torch._C._VariableFunctions, op._schema.name.removeprefix("aten::"), None)
    return op._op if has_defaults or named is None else named


def _casting(
    op: Any, dtype_of: Callable[[str, Any], torch.dtype | None] | None
) -> Callable[..., Any]:
    """Return a function that casts a call's tensors to one dtype. None of them is a keyword.

    Args:
        op: The operator.
        dtype_of: Returns the dtype for a device type and the tensors that every call has, not those
            in lists; None for arguments that stay. Without it, float32.
    """
    types = [str(argument.type) for argument in op._schema.arguments]
    tensors = [index for index, each in enumerate(types) if "Tensor" in each]
    required = [index for index, each in enumerate(types) if each == "Tensor"]

    def fit(kind: str, args: Any, kwargs: Any) -> Any:
        dtype = (
            torch.float32
            if dtype_of is None
            else dtype_of(kind, [args[index] for index in required])
        )
        if dtype is None:
            return args
        fitted = list(args)
        for index in tensors:
            # torch leaves out what is the default
            if index < len(fitted) and getattr(fitted[index], "dtype", None) is not dtype:
                fitted[index] = _cast(fitted[index], kind, dtype)
        return fitted

    return fit


def _float32_result(op: Any) -> Callable[..., Any]:
    """Return a function that asks for a result in float32 where a call names no ``dtype``."""
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def fit(kind: str, args: Any, kwargs: dict[str, Any]) -> Any:
        given = args[position] if len(args) > position else kwargs.get("dtype")
        if given is None and args and _is_eligible(args[0], kind):
            kwargs["dtype"] = torch.float32
            return args[:position]
        return args

    return fit


def _widest(kind: str, tensors: Any) -> torch.dtype | None:
    """Return the dtype for tensors of several dtypes: float32 if any is, else autocast's.

    Autocast's dtype may be another one than the program asked for, so tensors in either are
    accepted.
    """
    dtypes = {value.dtype for value in tensors if _is_eligible(value, kind)}
    if len(dtypes) < 2:
        return None
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(kind)


_DTYPES_IN_AUTOCAST = "Unexpected floating ScalarType in at::autocast::prioritize"


def _promoted(kind: str, tensors: Any) -> torch.dtype:
    """Return the dtype that ``at::autocast::promote_type`` finds for tensors.

    Raises:
        RuntimeError: Before any tensor in float32 there is one in neither float32 nor autocast's
            dtype.
    """
    lower = found = torch.get_autocast_dtype(kind)
    for value in tensors:
        if not _is_eligible(value, kind):
            continue
        if torch.float32 in (found, value.dtype):
            found = torch.float32
        elif value.dtype is not lower:
            raise RuntimeError(_DTYPES_IN_AUTOCAST)
    return found


_DTYPES: dict[str, Callable[[str, Any], torch.dtype | None]] = {
    _LOWER: lambda kind, tensors: torch.get_autocast_dtype(kind)
}


_UNSAFE_TO_AUTOCAST = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using "
    "torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(_UNSAFE_TO_AUTOCAST)


def _is_eligible(value: Any, kind: str) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _CAST and value.device.type == kind


_CAST = {
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and each.is_floating_point
}
_CAST.remove(torch.float64)


_to_float32 = torch.Tensor.float  # takes less time than `to`, whose arguments torch parses


def _to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _to_float32(value) if dtype is torch.float32 else value.to(dtype)


def _cast(value: Any, kind: str, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not _is_eligible(value, kind):
            return value
        return _cached_cast(value, dtype) if _is_weight(value, dtype) else _to(value, dtype)
    if isinstance(value, (list, tuple)):
        return [_cast(each, kind, dtype) for each in value]
    return value


_casts: dict[tuple[int, torch.dtype], tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
"""The ``_cdata`` of a weight and a dtype -> the weight and its cast, until the outermost region of
autocast ends.
"""


def clear_cache() -> None:
    """Drop the casts of weights."""
    _casts.clear()


def _is_weight(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch caches a tensor's cast: a float32 leaf that requires a gradient.

    Outside of a scope on the device nothing tells where a region of autocast ends, so nothing is
    cached there.
    """
    context = thread_state.state.context
    return (
        value.requires_grad
        and value.is_leaf
        and value.dtype is torch.float32
        and dtype is torch.get_autocast_dtype(value.device.type)
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
        and context is not None
        and context.device_type == value.device.type
        and not _is_cached_tensor(value)
    )


def _cached_cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    key = (weight._cdata, dtype)
    known, cast = _casts.get(key, (None, None))
    if cast is None or known is None or known() is not weight:
        cast = _to(weight, dtype)
        _casts[key] = (weakref.ref(weight), cast)
    return cast
