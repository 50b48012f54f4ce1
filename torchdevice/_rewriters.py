"""Which torch function takes a device argument, and how it is rewritten.

``TABLE`` maps a torch function, as the mode sees it, to its rewriter, or to None for functions that cannot carry a
device. Functions with a peculiar way of taking a device are registered here by hand; all others are classified at first
sight from torch's own operator schemas, so that no list of factories has to be kept.

A rewriter is called as ``rewriter(scope, func, args, kwargs)`` and makes the call. ``kwargs`` is its own to change.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchdevice._journal import Fidelity
from torchdevice._spelling import FORCE_CPU
from torchdevice.bindings import settings

if TYPE_CHECKING:
    from torchdevice._scope import Scope

Rewriter = Callable[["Scope", Any, tuple[Any, ...], dict[str, Any]], Any]

Table = dict[Any, Rewriter | None]

TABLE: Table = {}
READS: Table = {}
"""The getters, which only a scope with ``identity="cuda"`` rewrites."""

_MAX_TABLE = 50_000


def rewrites(*functions: Any, table: Table = TABLE) -> Callable[[Rewriter], Rewriter]:
    """Register the rewriter of some torch functions.

    Raises:
        ValueError: One of them is registered already.
    """

    def register(rewriter: Rewriter) -> Rewriter:
        for function in functions:
            if function in table:
                raise ValueError(f"{function!r} has a rewriter already")
            table[function] = rewriter
        return rewriter

    return register


# ---- construction ----------------------------------------------------------------------------------------------------


INSISTS_ON_CUDA = frozenset(
    {
        "accelerate.state",  # leaves mixed precision off, without a word, on a device that says cpu
        "lightning.fabric.accelerators.cuda",  # these raise "Device should be GPU"
        "lightning.pytorch.accelerators.cuda",
        "lightning_fabric.accelerators.cuda",
        "pytorch_lightning.accelerators.cuda",
        "torch.random",  # fork_rng of torch before 2.13 finds the module of the generator by it
    }
)
"""Modules that make a device and later ask it whether it says cuda. They keep it; it is rewritten where it is used."""


def _calling_module() -> str:
    """Return the name of the module that made the torch call which a rewriter, our caller, is handling."""
    frame: types.FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") == "torchdevice._entry_points":
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


@rewrites(torch.device)
def _device(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """``torch.device`` in all its forms; torch checks the spelling before we look at the result."""
    lone = args[0] if len(args) == 1 and not kwargs else None
    if lone == FORCE_CPU or (args == ("cpu", -1) and not kwargs):
        return scope.force_cpu()
    if type(lone) is int and lone >= 0:
        return scope.redirect(lone) or func(lone)
    made = func(*args, **kwargs)
    if made.type == "cuda" and (scope.identity == "cuda" or _calling_module() in INSISTS_ON_CUDA):
        return made
    return scope.redirect(made) or made


def with_device_keyword(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function with a keyword argument ``device``, and perhaps ``pin_memory`` and ``dtype``."""
    device = kwargs.get("device")
    if device is not None:
        target = scope.redirect(device)
        if target is not None:
            kwargs["device"] = target
    if scope.unsupported_dtypes:
        _fit_dtype(scope, kwargs)
    if kwargs.get("pin_memory") and not scope.runtime.pins_memory:
        kwargs["pin_memory"] = False
        return scope.pin(func(*args, **kwargs))
    return func(*args, **kwargs)


@functools.cache
def _with_device_at(position: int) -> Rewriter:
    """Return the rewriter of functions that take a device at ``position`` or by keyword."""

    def rewriter(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > position:
            args = _replace(args, position, scope.redirect(args[position]))
        return with_device_keyword(scope, func, args, kwargs)

    return rewriter


@rewrites(torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
def _from_data(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Constructors that take their dtype from the data, which the target may not be able to hold."""
    if not scope.unsupported_dtypes or kwargs.get("dtype") is not None or kwargs.get("device") is None:
        return with_device_keyword(scope, func, args, kwargs)
    device = scope.redirect(kwargs["device"]) or kwargs["device"]
    on_cpu = func(*args, **{**kwargs, "device": "cpu"})
    return on_cpu.to(device, scope.fit_dtype(on_cpu.dtype))


# ---- movement --------------------------------------------------------------------------------------------------------


@rewrites(torch.Tensor.to)
def _tensor_to(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.to``; a copy where CUDA makes one and sharing the memory would show."""
    device = args[1] if len(args) > 1 else kwargs.get("device")
    if device is None or isinstance(device, (torch.dtype, torch.Tensor)):
        return _converted(scope, func, args, kwargs)
    if device == FORCE_CPU:
        target: torch.device | None = scope.force_cpu()
    else:
        target = scope.redirect(device)
    if target is not None:
        args, kwargs = (_replace(args, 1, target), kwargs) if len(args) > 1 else (args, {**kwargs, "device": target})
    result = _converted(scope, func, args, kwargs)
    if result is args[0] and scope.runtime.shares_host_memory and (device == "cpu" or scope.is_borrowed(result)):
        return result.clone()
    return result


@rewrites(torch.Tensor.cuda, torch.Tensor.xpu)
def _tensor_cuda(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.cuda(device, non_blocking, memory_format)``, which is ``Tensor.to`` with a device it names."""
    if scope.runtime.kind == func.__name__:
        return func(*args, **kwargs)
    rest = {**dict(zip(("device", "non_blocking", "memory_format"), args[1:], strict=False)), **kwargs}
    device = rest.pop("device", None)
    if device is None:
        device = scope.current_spelling(func.__name__)
    return _tensor_to(scope, torch.Tensor.to, (args[0], device), rest)


@rewrites(torch.Tensor.cpu)
def _tensor_cpu(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.cpu``: a snapshot on CUDA, so never the tensor itself here, whose values may go on changing."""
    result = func(*args, **kwargs)
    return result.clone() if result is args[0] and scope.runtime.shares_host_memory else result


@rewrites(torch._C._nn._parse_to)
def _parse_to(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``Module.to`` calls to understand its arguments."""
    device = args[0] if args else kwargs.get("device")
    if device is not None and not isinstance(device, (torch.dtype, torch.Tensor)):
        target = scope.force_cpu() if device == FORCE_CPU else scope.redirect(device)
        if target is not None:
            args, kwargs = (_replace(args, 0, target), kwargs) if args else (args, {**kwargs, "device": target})
    parsed = func(*args, **kwargs)
    if parsed[1] in scope.unsupported_dtypes:
        parsed = (parsed[0], scope.fit_dtype(parsed[1]), *parsed[2:])
    return (*parsed[:2], False, *parsed[3:]) if scope.runtime.blocking_copies_only else parsed


@rewrites(torch.Tensor.type)
def _tensor_type(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.type``: a dtype, a legacy class such as ``torch.cuda.HalfTensor``, or its name."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        return scope.legacy_type_name(func(*args))
    if isinstance(wanted, torch.dtype):
        return _converted(scope, func, args, kwargs)
    dtype = scope.legacy_dtype(wanted)
    if dtype is None:
        return func(*args, **kwargs)
    return _tensor_to(scope, torch.Tensor.to, (args[0], scope.current_spelling("cuda")), {"dtype": dtype})


@rewrites(torch.Tensor.double, torch.Tensor.cdouble)
def _to_double(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].device.type == scope.runtime.kind and scope.unsupported_dtypes:
        return args[0].to(scope.fit_dtype(torch.float64 if func.__name__ == "double" else torch.complex128))
    return func(*args, **kwargs)


def _converted(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a conversion with the dtype the target can hold and, where the target needs it, a blocking copy."""
    if scope.unsupported_dtypes:
        args, kwargs = _fit_conversion(scope, args, kwargs)
    if scope.runtime.blocking_copies_only:
        kwargs = {**kwargs, "non_blocking": False} if "non_blocking" in kwargs else kwargs
        dtype_first = len(args) > 1 and isinstance(args[1], (torch.dtype, torch.Tensor))
        position = 2 if dtype_first or (len(args) > 2 and not isinstance(args[2], torch.dtype)) else 3
        if func.__name__ == "to" and len(args) > position and isinstance(args[position], bool):
            args = _replace(args, position, False)
    return func(*args, **kwargs)


def _fit_conversion(
    scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensor, *rest = args
    named = [value for value in (*rest, *kwargs.values()) if isinstance(value, torch.dtype)]
    devices = [value for value in (*rest, *kwargs.values()) if isinstance(value, torch.device)]
    if (devices[0] if devices else tensor.device).type != scope.runtime.kind:
        return args, kwargs
    if not named and tensor.dtype in scope.unsupported_dtypes:
        return args, {**kwargs, "dtype": scope.fit_dtype(tensor.dtype)}

    def fit(value: Any) -> Any:
        return scope.fit_dtype(value) if isinstance(value, torch.dtype) else value

    return (tensor, *map(fit, rest)), {name: fit(value) for name, value in kwargs.items()}


def _fit_dtype(scope: Scope, kwargs: dict[str, Any]) -> None:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if dtype in scope.unsupported_dtypes and device is not None and torch.device(device).type == scope.runtime.kind:
        kwargs["dtype"] = scope.fit_dtype(dtype)


# ---- memory hints ----------------------------------------------------------------------------------------------------


@rewrites(torch.Tensor.pin_memory, torch._pin_memory)
def _pin_memory(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Page-locked memory: the tensor itself where the target needs none."""
    return func(args[0]) if scope.runtime.pins_memory else scope.pin(args[0])


@rewrites(torch.Tensor.is_pinned)
def _is_pinned(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func(args[0]) if scope.runtime.pins_memory else scope.is_pinned(args[0])


@rewrites(torch.Tensor.record_stream)
def _record_stream(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hint to a caching allocator that is not in use."""
    scope.report("Tensor.record_stream", "nothing", Fidelity.INERT)


@rewrites(torch._C._nn.scaled_dot_product_attention)
def _attention(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Attention by a kernel that the target has, where the program allows only kernels that it lacks."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if not str(error).startswith(("No viable backend", "No available kernel")):
            raise
    scope.report("scaled_dot_product_attention by the enabled backends", "the target's own", Fidelity.APPROXIMATE)
    math_enabled = torch._C._get_math_sdp_enabled()
    torch._C._set_sdp_use_math(True)
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._set_sdp_use_math(math_enabled)


# ---- settings of CUDA libraries --------------------------------------------------------------------------------------


@rewrites(torch._cufft_get_plan_cache_max_size)
def _plan_cache_max_size(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return settings.plan_cache_max_size(scope, *args)


@rewrites(torch._cufft_set_plan_cache_max_size)
def _set_plan_cache_max_size(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    settings.set_plan_cache_max_size(scope, *args)


@rewrites(torch._cufft_get_plan_cache_size)
def _plan_cache_size(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 0


@rewrites(torch._cufft_clear_plan_cache)
def _clear_plan_cache(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """There is no cache to clear."""


# ---- reads, for identity="cuda" --------------------------------------------------------------------------------------


@rewrites(torch.Tensor.device.__get__, table=READS)
def _read_device(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    device = func(*args)
    return torch.device("cuda", device.index or 0) if device.type == scope.runtime.kind else device


@rewrites(torch.Tensor.is_cuda.__get__, table=READS)
def _read_is_cuda(scope: Scope, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _native_device(args[0]).type == scope.runtime.kind


def _native_device(tensor: torch.Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        return tensor.device


BY_HAND: Mapping[Any, Rewriter | None] = dict(TABLE)
"""What has a rewriter of its own, in every scope."""


# ---- everything else, from torch's own schemas -----------------------------------------------------------------------


CLASSES: tuple[Rewriter, ...] = (with_device_keyword, *map(_with_device_at, range(16)))
"""What a function can be found to be; no function of torch has a device so far back."""


def rewriter_of(scope: Scope, func: Any) -> Rewriter | None:
    """Return the rewriter of a function in a scope, None where it cannot carry a device."""
    found = scope.find(func, classify)
    return classify(func, scope.table) if found is classify else found


def classify(func: Any, table: Table) -> Rewriter | None:
    """Return the rewriter of a function seen for the first time, and remember it in ``table``."""
    if len(table) > _MAX_TABLE:
        return with_device_keyword
    found = _classify(func)
    table[func] = found
    return found


def _classify(func: Any) -> Rewriter | None:
    if isinstance(func, torch._ops.OpOverload):
        return _from_schemas([func._schema])
    if isinstance(func, torch._ops.OpOverloadPacket):
        return _from_schemas([getattr(func, name)._schema for name in func.overloads()])
    if isinstance(func, types.FunctionType):
        return _from_signature(func)
    if isinstance(func, types.MethodWrapperType):  # a property's __get__ or __set__
        return None
    schemas = _schemas(func)
    return _from_schemas(schemas) if schemas else with_device_keyword  # without a schema: Tensor.new


def _schemas(func: Any) -> list[Any]:
    """Return the overloads of one of torch's functions or methods that Python reaches; some have none.

    Overloads that begin with a device, such as the comparison of two, exist in TorchScript only.
    """
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(func, '__name__', '')}")
    return [schema for schema in schemas if not any(map(_is_device, schema.arguments[:1]))]


def takes_device(func: Any) -> bool:
    """Return whether one of torch's functions or methods has an argument for us to rewrite, by its schema."""
    return _from_schemas(_schemas(func)) is not None


def _from_schemas(schemas: list[Any]) -> Rewriter | None:
    """Return the rewriter for the overloads of one function: None if no overload takes a device."""
    arguments = [(index, argument) for schema in schemas for index, argument in enumerate(schema.arguments)]
    devices = [(index, argument) for index, argument in arguments if _is_device(argument)]
    positions = {index for index, argument in devices if not argument.kwarg_only}
    if positions:
        return _with_device_at(min(positions))
    if devices or any(argument.name in ("device", "pin_memory") for _, argument in arguments):
        return with_device_keyword
    return None


def _is_device(argument: Any) -> bool:
    kind = argument.type
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return kind.kind() == "DeviceObjType"


def _from_signature(func: types.FunctionType) -> Rewriter | None:
    """Return the rewriter of a Python function that handles the torch function protocol."""
    parameters = inspect.signature(func, follow_wrapped=False).parameters
    if "device" not in parameters:
        return None
    if parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY:
        return with_device_keyword
    return _with_device_at(list(parameters).index("device"))


def _replace(args: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    """Return ``args`` with one element exchanged; None leaves it as it is."""
    return args if value is None else (*args[:position], value, *args[position + 1 :])
