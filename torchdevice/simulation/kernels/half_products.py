"""Products, convolutions and slow functions of halves in float32, rounded once, on slow CPUs.

Torch's own kernels for half products take up to a hundred times as long on a CPU without half
arithmetic, and so do the gradients of convolutions in float16 on any. A GPU's matrix units also sum
in float32 and round once. The kernels are below autograd, so derivatives are computed in the same
way. Products with one vector are in ``vector_products.py``.

The conversions take two to four times as long as a function of each element in float32. So only the
functions are here whose kernels in half precision take longer still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.devices import registry
from torchdevice.kernel.devices.runtime import HALF
from torchdevice.simulation.kernels import vector_products

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

_NAMES = "addbmm addmm addmv baddbmm bmm convolution convolution_backward mm mv"

_FLOAT16 = frozenset({torch.float16})

_BFLOAT16 = frozenset({torch.bfloat16})

_FUNCTIONS = {
    "aten::binary_cross_entropy": _FLOAT16,
    "aten::dot": HALF,
    "aten::erfc": HALF,
    "aten::erfinv": HALF,
    "aten::linalg_vector_norm": _FLOAT16,
    "aten::norm.ScalarOpt_dim": _FLOAT16,
    "aten::pow.Tensor_Scalar": _FLOAT16,
    "aten::special_i1e": _FLOAT16,
    "aten::tan": HALF,
    "aten::tanh": HALF,
    "aten::var.correction": HALF,
    "aten::vdot": HALF,
}
"""Function -> the dtypes in which torch's kernel takes longer than the conversions, also where the
CPU has instructions for half products, which these kernels do not use.
"""

_SLOW_ON_ALL = {"aten::convolution_backward": _FLOAT16}
"""Operator -> the dtypes in which torch's kernel takes longer also where the CPU has instructions
for them.

oneDNN has no float16 kernel for the gradient of a convolution's weight, which takes 40 to 300 times
as long as in float32.
"""

_SUMS = frozenset({"aten::dot", "aten::vdot"})
"""Functions of :data:`_FUNCTIONS` whose kernel for float16 is as fast as for float32 on some CPUs.
It sums in float32 and rounds once.
"""

_VECTOR_PRODUCTS = frozenset({"aten::addmv", "aten::addmv_"})
"""Operators whose kernel for bfloat16 is slow also where the CPU has instructions for it."""

_OPERATORS = frozenset(
    (_ATTENTION, f"{_ATTENTION}_backward", *(f"aten::{name}" for name in _NAMES.split()))
)
"""The operators, of which torch makes all other products. Those in place take the same way."""

_LEAST_ELEMENTS = 1024
"""A product of tensors with fewer elements takes no longer than their conversion."""


def takes(op: Any) -> bool:
    """Return whether an operator computes one of the products or functions, without ``out=``."""
    name = op.name()
    return (
        name in _OPERATORS or name in _FUNCTIONS or (name.endswith("_") and name[:-1] in _OPERATORS)
    )


def slow_dtypes(op: Any) -> frozenset[torch.dtype]:
    """Return dtypes that are slower than float32 on this CPU for one of the operators."""
    name = op.name()
    if name in _SUMS and vector_products.sums_in_vectors():
        return _BFLOAT16
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    return registry.runtime("cpu").slow_product_dtypes | _SLOW_ON_ALL.get(name, frozenset())


def _option() -> str:
    context = thread_state.state.context
    return "auto" if context is None else context.options.half_products


def _wanted(op: Any, option: str) -> frozenset[torch.dtype]:
    if option == "auto":
        # Not in `slow_dtypes`: C++ would leave bfloat16 to Python, which costs small products more
        # than the row gains.
        if op.name() in _VECTOR_PRODUCTS and vector_products.multiplies_rows():
            return slow_dtypes(op) | _BFLOAT16
        return slow_dtypes(op)
    return _FUNCTIONS.get(op.name(), HALF) if option == "float32" else frozenset()


def in_float32(op: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes an operator on CPU tensors, in float32 for halves.

    Args:
        op: The operator.
        compute: Computes a call as it is.
    """
    written = op.name().endswith("_")
    # Attention's forward keeps the logarithms of its sums in float32.
    kept = torch.float32 if "attention" in op.name() else None
    # What is added is rounded with the product, into the tensor that is written to.
    if written:
        whole = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::")[:-1]).default
    else:
        whole = compute
    with_vector = vector_products.product_of(op.name().removesuffix("_"))

    def widened(args: Any, kwargs: Any) -> Any:
        return whole(*map(_widened, args), **{name: _widened(kwargs[name]) for name in kwargs})

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype, option = args[0].dtype, _option()
        if (
            dtype not in HALF
            or kwargs.get("dtype") is not None
            or dtype not in _wanted(op, option)
            or max(map(_elements, args)) < _LEAST_ELEMENTS
        ):
            return compute(*args, **kwargs)
        if any(isinstance(each, torch.Tensor) and each.dtype not in (dtype, kept) for each in args):
            return compute(*args, **kwargs)  # which torch refuses
        result = with_vector(*args, **kwargs) if option == "auto" else None
        if result is None:
            result = widened(args, kwargs)
        if written:
            return args[0].copy_(result)
        return _narrowed(op.name(), result, dtype)

    return run


def _narrowed(name: str, result: Any, dtype: torch.dtype) -> Any:
    """Return the results of an operator in a dtype of halves."""
    if name == _ATTENTION:
        return result[0].to(dtype), result[1]
    if isinstance(result, tuple):
        return tuple(None if each is None else each.to(dtype) for each in result)
    return result.to(dtype)


def _elements(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
