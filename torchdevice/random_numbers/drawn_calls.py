"""Calls that draw, on targets other than simulated GPUs: the host makes a GPU's numbers.

A call draws for the accelerator if its device, its generator or its tensors are the accelerator's.
On a CPU target, whose tensors do not tell, the numbers of tensors on an unknown side are the
accelerator's, see :mod:`torchdevice.calls.moves`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional, init
from torch.utils._python_dispatch import TorchDispatchMode

from torchdevice.calls import moves
from torchdevice.calls.rewriters import native_device, with_device_keyword
from torchdevice.kernel import dispatch_modes
from torchdevice.kernel.context import Context
from torchdevice.kernel.python.interrupt_safe_exit import block
from torchdevice.random_numbers import operators
from torchdevice.random_numbers.generators import GpuGenerator
from torchdevice.random_numbers.operators import OPERATORS, Drawing

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


class Numbers(TorchDispatchMode):
    """Gives the operators of a call a GPU's numbers.

    Args:
        drawing: Draws the numbers.
    """

    def __init__(self, drawing: Drawing):
        super().__init__()
        self._drawing = drawing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        make = _FACTORIES.get(name) or _FACTORIES.get(name.partition(".")[0])
        draw = OPERATORS.get(name)
        if make is None and draw is None:
            return func(*args, **kwargs)
        given = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
        }
        given = operators.named({**given, **kwargs})
        # A bound that is a tensor, as of no GPU's kernel here.
        if make is not None and not isinstance(given.get("high"), torch.Tensor):
            return make(self._drawing, given)
        return func(*args, **kwargs) if draw is None else _on_host(self._drawing, draw, given)


def _on_host(drawing: Drawing, draw: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Run an operator on CPU tensors, and return its results on the device of its tensors."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    device = next(
        (each.device for each in tensors.values()), given.get("device") or torch.device("cpu")
    )
    options = {
        name: value
        for name, value in given.items()
        if name not in ("device", "layout", "pin_memory")
    }
    found = draw(
        drawing, **{**options, **{name: _host_copy(each) for name, each in tensors.items()}}
    )
    written = tensors.get("out", tensors.get("self") if draw in _IN_PLACE else None)
    if written is None:
        if isinstance(found, tuple):
            return tuple(each.to(device) for each in found)
        return found.to(device)
    if not written.is_cpu:
        if written.shape != found.shape:
            written.resize_(found.shape)
        written.copy_(found)
    return written


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor itself, or a copy of another one with its strides."""
    if tensor.is_cpu:
        return tensor
    # Of elements that an expanded tensor repeats one is copied, as torch writes to no repeated one.
    strides = tensor.stride()
    once = [
        size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides, strict=True)
    ]
    copy = torch.empty_strided(once, strides, dtype=tensor.dtype, device="cpu")
    copy.copy_(tensor.as_strided(once, strides))
    return copy.expand(tensor.shape)


_IN_PLACE = frozenset(
    draw for name, draw in OPERATORS.items() if name.partition(".")[0].endswith("_")
)


# ---- factories -----------------------------------------------------------------------------------


def _new(given: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor that a factory fills."""
    if given.get("out") is not None:
        out: torch.Tensor = given["out"]
        return out.resize_(given["size"]) if "size" in given else out.resize_(given["self"].shape)
    names = ("dtype", "layout", "device", "pin_memory", "memory_format")
    options = {name: given[name] for name in names if given.get(name) is not None}
    if "self" in given:
        return torch.empty_like(given["self"], **options)
    return torch.empty(given["size"], **options)


def _write(
    fill: Callable[..., Any], made: torch.Tensor, drawing: Drawing, args: Any
) -> torch.Tensor:
    host = _host_copy(made)
    fill(drawing, host, *args)
    return made if host is made else made.copy_(host)


def _uniform(drawing: Drawing, given: dict[str, Any]) -> torch.Tensor:
    return _write(operators.uniform_, _new(given), drawing, ())


def _normal(drawing: Drawing, given: dict[str, Any]) -> torch.Tensor:
    return _write(operators.normal_, _new(given), drawing, ())


def _normal_of(drawing: Drawing, given: dict[str, Any]) -> torch.Tensor:
    return _write(operators.normal_, _new(given), drawing, (given["mean"], given["std"]))


def _integers(drawing: Drawing, given: dict[str, Any]) -> torch.Tensor:
    # The dtype of integers is torch's default for them, unless they are like another tensor.
    if "self" not in given and given.get("out") is None:
        given = {**given, "dtype": given.get("dtype") or torch.int64}
    return _write(operators.random_from, _new(given), drawing, (given.get("low", 0), given["high"]))


_FACTORIES: dict[str, Callable[[Drawing, dict[str, Any]], torch.Tensor]] = {
    "aten::normal.float_float": _normal_of,
    "aten::normal.float_float_out": _normal_of,
    "aten::rand": _uniform,
    "aten::rand_like": _uniform,
    "aten::randn": _normal,
    "aten::randn_like": _normal,
    "aten::randint": _integers,
    "aten::randint_like": _integers,
}


# ---- rewriters -----------------------------------------------------------------------------------


def _drawn(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that draws numbers, or that calls such functions."""
    drawing = _drawing_for(context, args, kwargs)
    if drawing is None:
        return with_device_keyword(context, func, args, kwargs)
    kwargs.pop("generator", None)  # which another device's kernel would refuse
    with _numbers(drawing):
        return with_device_keyword(context, func, args, kwargs)


@block
def _numbers(drawing: Drawing) -> Iterator[None]:
    mode = Numbers(drawing)
    dispatch_modes.enter(mode)
    try:
        yield
    finally:
        dispatch_modes.leave(mode)


def _dropped(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.nn.functional.dropout`` and ``torch.dropout``: on CUDA a kernel of its own."""
    # The function of torch has another name for one of them.
    named = {"training" if name == "train" else name: value for name, value in kwargs.items()}
    given = inspect.signature(functional.dropout).bind(*args, **named)
    given.apply_defaults()
    tensor, p, trains, in_place = given.args
    if in_place or not trains or not 0 < p < 1:
        drawing = None
    else:
        drawing = _drawing_for(context, args, kwargs)
    if drawing is None or not tensor.numel():
        return _drawn(context, func, args, kwargs)
    with _numbers(drawing):
        return torch.native_dropout(tensor, p, True)[0]


def _drawing_for(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Drawing | None:
    """Return a function that draws a call's numbers for the accelerator, or None."""
    # Compiled code draws the target's numbers, and fake tensors have none.
    if torch.compiler.is_compiling() or context.thread.forced_cpu or dispatch_modes.is_tracing():
        return None
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    if any(type(each) not in _PLAIN for each in tensors):
        return None
    generator = kwargs.get("generator")
    if generator is not None:
        return generator.drawing(context) if isinstance(generator, GpuGenerator) else None
    index = _index(context, kwargs.get("device"), tensors)
    if index is None:
        return None
    default: Any = context.runtime.default_generator(index)
    return default.drawing(context)  # type: ignore[no-any-return]


def _index(context: Context, asked: Any, tensors: list[torch.Tensor]) -> int | None:
    """Return the index of the accelerator that a call draws for; None for another device."""
    if asked is not None:
        target = _redirected(context, asked)
        if (
            context.runtime.shares_host_memory
            and moves.side_meant(context, asked, target) is not moves.Side.DEVICE
        ):
            return None
        device = target or torch.device(asked)
    elif tensors:
        device = native_device(tensors[0])
        if context.runtime.shares_host_memory and moves.side_of(tensors[0]) is moves.Side.HOST:
            return None
    else:
        return None
    return (device.index or 0) if device.type == context.device_type else None


def _redirected(context: Context, asked: Any) -> torch.device | None:
    """Return an argument's redirected device. The call, not this, reports known ones."""
    known: Any = (
        context.thread.redirects.get(asked, ()) if isinstance(asked, (str, torch.device)) else ()
    )
    if known == ():
        return context.redirect(asked)
    return None if known is None else known[0]


def _named(owner: Any, names: str) -> tuple[Any, ...]:
    return tuple(getattr(owner, name) for name in names.split() if hasattr(owner, name))


_OF_TENSORS = (
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ bernoulli "
    "multinomial"
)

_DRAWING = (
    *_named(
        torch,
        "rand randn randint randperm rand_like randn_like randint_like normal bernoulli "
        "multinomial",
    ),
    *_named(
        torch,
        "native_dropout alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ dropout_",
    ),
    *_named(torch, "feature_alpha_dropout feature_alpha_dropout_"),
    *_named(torch.Tensor, _OF_TENSORS),
    *_named(
        functional,
        "alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout gumbel_softmax",
    ),
    *_named(
        init,
        "uniform_ normal_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ "
        "xavier_normal_",
    ),
    *_named(init, "orthogonal_ sparse_"),
)

REWRITERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_DRAWING, _drawn),
    **dict.fromkeys((torch.dropout, functional.dropout), _dropped),
}
"""Function of torch -> its rewriter."""
