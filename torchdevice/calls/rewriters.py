"""How the device argument of a torch function is rewritten.

``REGISTERED`` maps a torch function, as the mode sees it, to its rewriter. A function with a
peculiar way of taking a device is registered by hand, here or in the file of its area; None means
that a function cannot carry a device. ``lookup.py`` finds the rewriter of every other function.

A rewriter is called as ``rewriter(context, func, args, kwargs)`` and makes the call. It may change
``kwargs``.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchdevice.calls import moves
from torchdevice.calls.lacking import float64_policy
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.devices.device_strings import FORCE_CPU, FORCING_CPU
from torchdevice.kernel.fidelity import Fidelity

Rewriter = Callable[[Context, Any, tuple[Any, ...], dict[str, Any]], Any]

Table = dict[Any, Rewriter | None]

REGISTERED: Table = {}
"""The rewriters that are registered by hand, for every context."""

_ABOVE = 3
"""How many callers of the journal belong to this package where a rewriter redirects: the mode calls
the rewriter.
"""

READS: Table = {}
"""The getters of tensors, which only a scope with ``identity="program"`` rewrites."""

COPIES: Table = {}
"""The copies into tensors that are there, which only a scope on a target whose copies must block
rewrites.
"""

DROPS: Table = {}
"""Rewriters of functions that make a tensor drop an object. Wrappers need none: they leave the mode
on.
"""


def rewrites(*functions: Any, table: Table = REGISTERED) -> Callable[[Rewriter], Rewriter]:
    """Return a decorator that registers the rewriter of these torch functions.

    Raises:
        ValueError: One of the functions has a rewriter already.
    """

    def register(rewriter: Rewriter) -> Rewriter:
        for function in functions:
            if function in table:
                raise ValueError(f"{function!r} has a rewriter already")
            table[function] = rewriter
        return rewriter

    return register


# ---- construction --------------------------------------------------------------------------------


# Compared as versions: torch's version text is a `TorchVersion`.
_FINDS_MODULE_BY_TYPE = "torch.random" if torch.__version__ < "2.13" else None
"""The module of torch whose ``fork_rng``, before torch 2.13, makes a device only to find
``torch.cuda`` by its type.
"""


def _calling_module(above: int = _ABOVE) -> str:
    """Return the name of the module that made the torch call which a rewriter is handling.

    Args:
        above: How many frames belong to this package: this function's, those of the rewriter, and
            the mode's handler.
    """
    frame: types.FrameType | None = sys._getframe(above)
    while frame is not None and frame.f_globals.get("__name__") == "torchdevice.calls.wrap":
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""


@rewrites(torch.device)
def _device(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.device:
    """``torch.device`` in all its forms. torch makes the device first, and raises for wrong ones.

    A device of another accelerator than the program's is not rewritten, because programs compare
    with it, and torch's own ``GradScaler`` does. The device is redirected where a tensor, module or
    generator is put on it.
    """
    # A single positional argument is the usual spelling, and the only one that may be an ordinal.
    lone = args[0] if len(args) == 1 and not kwargs else None
    if not kwargs and args in FORCING_CPU:
        return context.thread.force_cpu()
    if type(lone) is int:  # `type`, since True is no ordinal
        return _device_of_ordinal(context, func, lone)
    # A device made from a device is the same object, without a call.
    made = lone if type(lone) is torch.device else func(*args, **kwargs)
    # The program's own name for the device stays.
    if made.type == context.shown_as:
        if type(lone) is str:
            # For the constructor in `wrap.py`, see below.
            context.thread.redirects[args] = made, "", ""
        return made
    # "cpu" in the program's text is the host's side, while `x.device` is "cpu" on both.
    if context.runtime.shares_host_memory and _spells_host(context, args, kwargs):
        return moves.host_device(made.type, made.index)
    return _redirected(context, args, lone, made) if made.type == context.program else made


def _device_of_ordinal(context: Context, func: Any, ordinal: int) -> torch.device:
    device = context.redirect(ordinal, _ABOVE + 1)
    return func(ordinal) if device is None else context.devices.shown(device)


def _spells_host(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return moves.spells_host(context, args[0] if args else kwargs.get("type"))


def _redirected(
    context: Context, args: tuple[Any, ...], lone: Any, made: torch.device
) -> torch.device:
    """Return the target's device for one of the program's accelerator that torch has made."""
    if _FINDS_MODULE_BY_TYPE and _calling_module(_ABOVE + 1) == _FINDS_MODULE_BY_TYPE:
        return made
    device = context.redirect(made, _ABOVE + 1)
    if device is None:
        return made
    shown = context.devices.shown(device)
    known = context.thread.redirects.get(made)
    # For the constructor in `wrap.py`, by a key that no device argument has: a tuple. A folded
    # ordinal is reported each time, and so is not known.
    if type(lone) is str and known is not None:
        context.thread.redirects[args] = shown, *known[1:]
    return shown


def with_device_keyword(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Rewrite a call with the keyword ``device``, and perhaps ``pin_memory`` and ``dtype``."""
    asked = kwargs.get("device")
    target = None if asked is None else context.redirect(asked, _ABOVE)
    if target is not None:
        kwargs["device"] = target
    if context.dtypes.unsupported:
        kept = float64_policy.created_on_cpu(context, func, args, kwargs)
        if kept is not None:
            return kept
    return _create(context, func, args, kwargs, asked, target)


NAMING = {with_device_keyword}
"""Rewriters of factories that only rewrite a device, where a call is given no other argument of a
device.
"""


def _create(
    context: Context,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: Any,
    target: Any,
) -> Any:
    """Make a call that creates a tensor. Mark the tensor's side, and remember that it is pinned."""
    # Without page-locked memory on the target the context remembers which tensors are pinned.
    pins = kwargs.get("pin_memory") and not context.runtime.pins_memory
    if pins:
        _check_pinning(context, target)
        kwargs["pin_memory"] = False
    result = func(*args, **kwargs)
    if not context.runtime.has_peaks:
        note_memory(context)
    if context.runtime.shares_host_memory:
        # Without a device the tensor is on the side of the default device.
        if asked is None:
            return moves.created_by_default(
                func, args, kwargs, _pinned(context, result) if pins else result
            )
        result = moves.created(context, args[0] if args else None, result, asked, target)
    elif context.devices.are_folded and asked is not None and args:
        result = moves.moved_among_devices(context, args[0], result)
    return _pinned(context, result) if pins else result


def _pinned(context: Context, tensor: torch.Tensor) -> torch.Tensor:
    """Remember that the program pinned a tensor of the host, and return it: on a Mac, on the
    device.
    """
    supplied = context.runtime.supplied
    if supplied.pins_on_device and context.program == supplied.location_tag:
        tensor = tensor.to(context.devices.current)
    return context.pinned.add(tensor)


def _check_pinning(context: Context, target: Any) -> None:
    """Refuse to pin a tensor that a call makes on the accelerator."""
    is_on_host = (
        target is None or target.type != context.device_type or context.runtime.shares_host_memory
    )
    if not is_on_host:
        raise RuntimeError("Only dense CPU tensors can be pinned")  # torch's words


def note_memory(context: Context) -> None:
    """Sample the memory of a target without peaks, after a call that may have allocated much."""
    context.runtime.note_memory()


@functools.cache
def with_device_at(position: int) -> Rewriter:
    """Return the rewriter of functions that take a device at ``position`` or by keyword."""

    def rewriter(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The position may be left out, and then the device is a keyword or absent.
        if len(args) <= position:
            return with_device_keyword(context, func, args, kwargs)
        target = context.redirect(args[position], _ABOVE)
        return _create(
            context, func, _replace(args, position, target), kwargs, args[position], target
        )

    return rewriter


# ---- movement ------------------------------------------------------------------------------------


@rewrites(torch.Tensor.to)
def move(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.to``: a copy where CUDA makes one (see :mod:`torchdevice.calls.moves`)."""
    device = args[1] if len(args) > 1 else kwargs.get("device", kwargs.get("tensor"))
    # `x.to(dtype)` and `x.to(other)`; the latter moves to the device of the other tensor.
    if device is None or isinstance(device, (torch.dtype, torch.Tensor)):
        result = convert(context, func, args, kwargs)
        if isinstance(device, torch.Tensor):
            return _moved_beside(context, args[0], result, device)
        return moves.followed(args[0], result) if context.runtime.shares_host_memory else result
    is_switch = device.__class__ is str and device == FORCE_CPU
    target = context.thread.force_cpu() if is_switch else context.redirect(device, _ABOVE)
    if target is not None:
        if len(args) > 1:
            args = (args[0], target, *args[2:])
        else:
            kwargs = {**kwargs, "device": target}
    if context.dtypes.fits_conversions:
        result = convert(context, func, args, kwargs)
    else:
        result = func(*args, **kwargs)
    if not context.runtime.has_peaks:
        note_memory(context)
    if context.runtime.shares_host_memory:
        return moves.moved(context, args[0], result, moves.side_meant(context, device, target))
    return moves.moved_among_devices(context, args[0], result)


def _moved_beside(
    context: Context, tensor: torch.Tensor, result: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Return the result of a move of a tensor to the device of another one."""
    if context.runtime.shares_host_memory:
        return moves.moved(context, tensor, result, moves.side_of(other))
    return moves.moved_among_devices(context, tensor, result)


@rewrites(*(getattr(torch.Tensor, family) for family in FAMILIES if hasattr(torch.Tensor, family)))
def move_to_family(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Tensor.cuda`` and its siblings: ``Tensor.to`` the method's accelerator."""
    # On the target's own method, and on the method of an accelerator that is absent, torch's error
    # or answer stands.
    if context.device_type == func.__name__ or func.__name__ not in context.names.families:
        return func(*args, **kwargs)
    rest = {
        **dict(zip(("device", "non_blocking", "memory_format"), args[1:], strict=False)),
        **kwargs,
    }
    device = rest.pop("device", None)
    if device is None:
        # The current device of that accelerator, as CUDA does for `x.cuda()`.
        device = f"{func.__name__}:{context.thread.device_index}"
    # As `Tensor.to`, so that all moves follow one rule.
    return move(context, torch.Tensor.to, (args[0], device), rest)


@rewrites(torch.Tensor.cpu)
def to_host(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.cpu``, which is ``Tensor.to("cpu")``."""
    result = func(*args, **kwargs)
    if context.runtime.shares_host_memory:
        return moves.moved(context, args[0], result, moves.Side.HOST)
    return result


@rewrites(torch.Tensor.type_as)
def _type_as(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.type_as``, which also moves a tensor to the other tensor's device."""
    other = args[1] if len(args) > 1 else kwargs["other"]
    return _moved_beside(context, args[0], func(*args, **kwargs), other)


@rewrites(torch.Tensor.clone, torch.clone)
def _clone(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``clone``, whose result alone takes its source's mark: programs keep clones as copies."""
    result = func(*args, **kwargs)
    source = args[0] if args else kwargs["input"]
    return moves.followed(source, result) if context.runtime.shares_host_memory else result


@rewrites(torch._C._nn._parse_to)
def _parse_to(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch._C._nn._parse_to``, which parses the arguments of ``Module.to``."""
    asked = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
    target = None
    names_device = _names_device(asked)
    if names_device:
        if asked == FORCE_CPU:
            target = context.thread.force_cpu()
        else:
            target = context.redirect(asked, _ABOVE)
    if target is not None and args:
        args = _replace(args, 0, target)
    elif target is not None:
        kwargs = {**kwargs, "device": target}
    device, dtype, non_blocking, *rest = func(*args, **kwargs)
    non_blocking = non_blocking and not context.runtime.blocking_copies_only
    if device is None:
        return (device, dtype, non_blocking, *rest)
    # `Module.to` hands the device on without its spelling, so its object carries the side.
    if context.runtime.shares_host_memory:
        side = moves.side_meant(context, asked, target) if names_device else moves.side_of(asked)
        device = moves.device_meaning(context, device, side)
    # torch's `Module.to` needs the target. Lightning keeps it as a module's device, and compares it
    # with a tensor's.
    if _shows_devices(context) and not _calling_module().startswith("torch."):
        device = context.devices.shown(device)
    return (device, dtype, non_blocking, *rest)


def _names_device(asked: Any) -> bool:
    """Return whether the first argument of ``to`` is a device, not a dtype or a tensor."""
    return asked is not None and not isinstance(asked, (torch.dtype, torch.Tensor))


def _shows_devices(context: Context) -> bool:
    return context.shown_as is not None and not torch.compiler.is_compiling()


@rewrites(torch.Tensor.double, torch.Tensor.cdouble)  # type: ignore[attr-defined]
def _to_double(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.double`` and ``Tensor.cdouble``.

    torch's GradScaler calls ``double`` only for better rounding, and not on MPS
    (torch/amp/grad_scaler.py).
    """
    if not context.dtypes.unsupported or not context.devices.is_targets(args[0].device):
        return func(*args, **kwargs)
    # Torch calls `double` there for rounding alone, and skips it on MPS.
    if not torch.compiler.is_compiling() and _calling_module() == "torch.amp.grad_scaler":
        return args[0]
    dtype = torch.float64 if func.__name__ == "double" else torch.complex128
    return convert(context, torch.Tensor.to, (args[0], dtype), {})


def convert(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a conversion with a dtype the target has, and make its copy blocking if need be."""
    if context.dtypes.unsupported:
        dtype, device = float64_policy.result_of_conversion(args, kwargs)
        if dtype in context.dtypes.unsupported and context.devices.is_targets(device):
            if context.dtypes.keeps_doubles:
                return float64_policy.keep(context, args[0], dtype, device)
            args, kwargs = float64_policy.fit_conversion(context, args, kwargs, dtype)
    if context.runtime.blocking_copies_only:
        kwargs = _blocking(kwargs)
        dtype_first = len(args) > 1 and isinstance(args[1], (torch.dtype, torch.Tensor))
        # Of non_blocking: a device is followed by a dtype, which may be None.
        position = 2 if dtype_first else 3
        if len(args) > position and args[position] is True:
            # An explicit False needs no change.
            args = _replace(args, position, False)
    return func(*args, **kwargs)


def _blocking(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "non_blocking": False} if "non_blocking" in kwargs else kwargs


@rewrites(torch.Tensor.copy_, torch._foreach_copy_, table=COPIES)
def _copy_into(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.copy_(src, non_blocking)``, as a blocking copy."""
    # Both overloads have at most two arguments before `non_blocking`.
    return func(*args[:2], **_blocking(kwargs))


# ---- memory hints --------------------------------------------------------------------------------


@rewrites(torch.Tensor.pin_memory, torch._pin_memory)
def _pin_memory(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.pin_memory``: a copy as on CUDA, in ordinary memory if the target needs no other."""
    device = args[1] if len(args) > 1 else kwargs.get("device")
    if (
        device is not None
        and context.redirect(device) is None
        and not context.devices.is_targets(torch.device(device))
    ):
        return func(args[0], device)  # torch's own error: no such accelerator is there
    if context.runtime.pins_memory:
        return func(args[0])
    if context.pinned.holds(args[0]):
        return args[0]
    if (
        not context.runtime.shares_host_memory
        and native_device(args[0]).type == context.device_type
    ):
        accelerator = context.shown_as or context.device_type
        # The type's text names the target; the error must name what the program sees.
        name = args[0].type().replace(f"torch.{context.device_type}.", f"torch.{accelerator}.")
        # Torch's words.
        raise RuntimeError(f"cannot pin '{name}' only dense CPU tensors can be pinned")
    # Page-locked memory is the host's.
    side = moves.Side.HOST if context.runtime.shares_host_memory else None
    return _pinned(context, moves.mark(args[0].clone(), side))


@rewrites(torch.Tensor.is_pinned)
def _is_pinned(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func(args[0]) if context.runtime.pins_memory else context.pinned.holds(args[0])


@rewrites(torch.Tensor.record_stream)
def _record_stream(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``Tensor.record_stream``, which defers reuse of memory on devices with CUDA's allocator."""
    if not context.observers.order:
        context.report("Tensor.record_stream", "nothing", Fidelity.INERT)
    stream = args[1] if len(args) > 1 else kwargs["s"]
    context.observers.tell("memory_used", args[0], (stream.device_index, stream.stream_id))


@rewrites(torch._C._nn.scaled_dot_product_attention)
def attention(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Attention by the target's own backends if the target lacks those the program enables."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if not str(error).startswith(("No viable backend", "No available kernel")):
            raise
    context.report(
        "scaled_dot_product_attention by the enabled backends",
        "the target's own",
        Fidelity.APPROXIMATE,
    )
    # Math is there on every device, and flash is the one that context_parallel divides among ranks.
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.OVERRIDEABLE]):
        return func(*args, **kwargs)


# ---- reads, for identity="program" ---------------------------------------------------------------


@rewrites(torch.Tensor.device.__get__, table=READS)
def _read_device(
    context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.device:
    return context.devices.shown(func(*args))


def _reads_kind(accelerator: str, getter: Any) -> None:
    """Register the rewriter of ``Tensor.is_cuda`` or one of its siblings."""

    def is_there(
        context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        # The device that torch itself reports, not the one that a scope shows.
        on_target = native_device(args[0]).type == context.device_type
        return on_target if context.shown_as == accelerator else func(*args) and not on_target

    rewrites(getter, table=READS)(is_there)


for _family in FAMILIES:
    if hasattr(torch.Tensor, f"is_{_family}"):
        _reads_kind(_family, getattr(torch.Tensor, f"is_{_family}").__get__)


def native_device(tensor: torch.Tensor) -> torch.device:
    """Return the device that torch itself reports for a tensor."""
    with torch._C.DisableTorchFunction():
        return tensor.device


def _replace(args: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    """Return ``args`` with ``value`` at ``position``; unchanged if ``value`` is None."""
    return args if value is None else (*args[:position], value, *args[position + 1 :])
