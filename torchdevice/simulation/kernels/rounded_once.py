"""Functions of halves that CUDA's kernels compute in float32 and round once.

The CPU's kernels round in between: sums, means and buffers are halves, and so is the number in
``x + 0.3``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from torchdevice.kernel.devices.runtime import HALF
from torchdevice.simulation.allocator import storages

_FUNCTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "_adaptive_avg_pool3d",
        "_embedding_bag",
        "_embedding_bag_backward",
        "_embedding_bag_dense_backward",
        "_embedding_bag_forward_only",
        "_log_softmax",
        "_softmax",
        "avg_pool2d_backward",
        "embedding_dense_backward",
        "glu_backward",
        "grid_sampler_2d",
        "grid_sampler_3d",
        "log_sigmoid_backward",
        "log_sigmoid_forward",
        "logit",
        "logit_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "nll_loss_forward",
        "prod",
        "rsqrt",
        "special_entr",
        "special_i0e",
        "special_xlog1py",
        "upsample_bicubic2d",
        "upsample_linear1d",
        "upsample_trilinear3d",
        "xlogy",
    )
)
"""The operators, of all overloads without ``out=``. Those in place take the same way.

Not here are kernels that round in between on CUDA too, such as ``tanh_backward``, and what adds
halves of several threads into one element. Batch norm is in ``cpu_kernels.py``.
"""

_WITH_NUMBERS = frozenset({"aten::add", "aten::rsub", "aten::sub"})
"""The operators whose numbers CUDA does not round to the dtype of the tensors."""

_KEPT = {"aten::log_sigmoid_forward": {1}, "aten::native_layer_norm": {1, 2}}
"""Operator -> the places of the results that stay float32, because only a derivative reads them."""

_ROUNDING_NUMBERS = frozenset({"aten::special_xlog1py", "aten::xlogy"})
"""The operators that take a number for a tensor, and round it to the tensor's dtype."""

_OF_NUMBERS = (torch.float64, torch.int64)
"""The dtypes of the tensors that torch makes of numbers."""

_READING_KEPT = {f"{name.removesuffix('_forward')}_backward" for name in _KEPT}


def takes(op: Any) -> bool:
    """Return whether CUDA computes an operator, without ``out=``, in float32."""
    return _takes(op, _FUNCTIONS)


def takes_numbers(op: Any) -> bool:
    """Return whether an operator, without ``out=``, has numbers that CUDA does not round."""
    return _takes(op, _WITH_NUMBERS)


def _takes(op: Any, names: frozenset[str]) -> bool:
    schema = op._schema
    return schema.name.rstrip("_") in names and not any(each.is_out for each in schema.arguments)


def in_float32(op: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes an operator on CPU tensors, in float32 for halves.

    Args:
        op: The operator.
        compute: Computes a call as it is.
    """
    whole, kept = _without_writing(op, compute), _KEPT.get(op.name(), set())
    ignored = torch.float32 if op.name() in _READING_KEPT else None
    rounds_numbers = _takes(op, _ROUNDING_NUMBERS)
    has_numbers = rounds_numbers or _takes(op, _WITH_NUMBERS)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = tuple(map(_unwrapped, args)) if has_numbers else args
        dtype = _common_half(given, ignored)
        if dtype is None or kwargs.get("dtype") is not None:
            return compute(*args, **kwargs)
        if has_numbers:
            given = _with_numbers(given, args, dtype, rounds_numbers)
        named = {name: _widened(each) for name, each in kwargs.items()}
        result = whole(*map(_widened, given), **named)
        if whole is not compute:
            return args[0].copy_(result)
        return _narrowed_but(kept, result, dtype)

    return run


def with_whole_numbers(op: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes an operator, in float32 for numbers that halves lack."""
    wide = in_float32(op, compute)

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype if isinstance(args[0], torch.Tensor) else None
        if dtype not in HALF:
            dtype = args[1].dtype if isinstance(args[1], torch.Tensor) else None
        if dtype in HALF and not all(
            _is_exact(each, dtype)
            for each in map(_unwrapped, (*args, *kwargs.values()))
            if each.__class__ in (int, float)
        ):
            return wide(*args, **kwargs)
        return compute(*args, **kwargs)

    return run


def _without_writing(op: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes an in-place operator into a new tensor."""
    name = op._schema.name.removeprefix("aten::")
    if not name.endswith("_"):
        return compute
    return getattr(torch.ops.aten, name[:-1])  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def _is_exact(number: float, dtype: torch.dtype) -> bool:
    wide = torch.tensor(number, dtype=torch.float64)
    return torch.equal(wide.to(dtype).double(), wide)


def _unwrapped(value: Any) -> Any:
    """Return the number that torch made a tensor of; another value as it is."""
    if not isinstance(value, torch.Tensor) or value.dim() or value.dtype not in _OF_NUMBERS:
        return value
    return value if _is_of_device(value) else value.item()


def _is_of_device(tensor: torch.Tensor) -> bool:
    """Return whether a CPU tensor stands for a tensor of the device with one number.

    CUDA rounds such a one to the dtype of the halves beside it, and no number and no CPU tensor.
    """
    if tensor.dim() or tensor.dtype not in _OF_NUMBERS:
        return False
    return storages.owner_of(tensor.untyped_storage()) is not None


def _wrapped_as(value: Any, given: Any) -> Any:
    """Return a number as a float32 tensor, if it was given as a tensor, as kernels take it."""
    if isinstance(given, torch.Tensor) and not isinstance(value, torch.Tensor):
        return torch.tensor(value, dtype=torch.float32)
    return value


def _rounded(value: Any, dtype: Any) -> Any:
    return torch.tensor(value, dtype=dtype).item() if value.__class__ in (int, float) else value


def _common_half(args: tuple[Any, ...], ignored: torch.dtype | None) -> torch.dtype | None:
    """Return the half precision of all floating-point tensors among arguments; None without it.

    Tensors of several dtypes are promoted by torch, or refused.

    Args:
        args: The arguments.
        ignored: A dtype that tensors after the first may have beside it.
    """
    tensors = (each for each in args if isinstance(each, torch.Tensor) and not _is_of_device(each))
    dtypes = [each.dtype for each in tensors if each.dtype.is_floating_point]
    if not dtypes:
        return None
    first, *others = dtypes
    if first not in HALF or any(each not in (first, ignored) for each in others):
        return None
    return first


def _with_numbers(
    given: tuple[Any, ...], args: tuple[Any, ...], dtype: torch.dtype, rounds: bool
) -> tuple[Any, ...]:
    """Return arguments in the form in which a kernel takes numbers, and rounds them as CUDA does.

    Args:
        given: The arguments, with numbers instead of the tensors that torch made of them.
        args: The arguments as they were.
        dtype: That of the halves.
        rounds: Whether the operator rounds numbers too.
    """
    given = tuple(_as_dtype(each, dtype) for each in given)
    if rounds:
        given = tuple(_rounded(each, dtype) for each in given)
    return tuple(map(_wrapped_as, given, args))


def _as_dtype(value: Any, dtype: Any) -> Any:
    """Return a tensor of the device without dimensions in a dtype; another value as it is."""
    if isinstance(value, torch.Tensor) and _is_of_device(value):
        return value.to(dtype)
    return value


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in HALF:
        return value.float()
    return value


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
        return value.to(dtype)
    return value


def _narrowed_but(kept: Collection[int], result: Any, dtype: torch.dtype) -> Any:
    """Return a result or several in a dtype, but for those at some places."""
    if not isinstance(result, tuple):
        return _narrowed(result, dtype)
    return tuple(
        each if place in kept else _narrowed(each, dtype) for place, each in enumerate(result)
    )
