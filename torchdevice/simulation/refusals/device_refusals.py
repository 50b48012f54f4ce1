"""What CUDA and MPS refuse of an operator: rules, those derived from torch's own tables, and assertions of values.

Operators without a deterministic kernel are those that ``torch.use_deterministic_algorithms`` documents;
``test_cuda_refusals.py`` reads its docstring. Those that the CPU has no deterministic kernel for either, such as
``max_unpool2d``, refuse on their own. ``cumsum`` and the backward of ``ReflectionPad2d`` are documented still, but
their alerts are gone from ``libtorch_cuda.so`` of torch 2.10 and 2.15, and so is the demand for
``CUBLAS_WORKSPACE_CONFIG``.

The rules of MPS name files below ``aten/src/ATen/native`` of torch. Those of CUDA are in ``cuda_rules.py``.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchdevice.kernel.python import data_files
from torchdevice.kernel.stand_ins import given_to, tensors
from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of
from torchdevice.simulation.profiles import is_cpu_only, missing_on_cuda
from torchdevice.simulation.refusals import cuda_rules
from torchdevice.simulation.refusals.refusal_rules import Rule, by_operator, name_of, scalar_type

_TABLES: Mapping[str, Any] = data_files.read(__file__, "cuda_operators.json")


def _computes_in_floats(given: Mapping[str, Any]) -> bool:
    dtype = given.get("dtype") or given["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


_CONCERNS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "nll_loss2d_forward": lambda given: given.get("reduction") != 0,
    "_embedding_bag_backward": lambda given: given.get("mode") == 2,
    "put": lambda given: bool(given.get("accumulate")),
    "histc": _computes_in_floats,
    "bincount": lambda given: given.get("weights") is not None,
    "median": lambda given: "dim" in given,
    "nanmedian": lambda given: "dim" in given,
    "scatter_reduce": lambda given: given.get("reduce") == "prod",
}
"""Operators that have a deterministic kernel for other arguments."""

_RAISING = (torch.use_deterministic_algorithms.__doc__ or "").partition("operations will throw a")[2]
"""The part of the documentation that lists operators without a deterministic kernel."""

OPERATORS: Mapping[str, str] = {
    name: kernel
    for name, kernel in _TABLES["nondeterministic"].items()
    # torch 2.13 has a deterministic kernel.
    if name != "max_pool3d_with_indices_backward" or "torch.nn.MaxPool3d" in _RAISING
}
"""Operator without a deterministic kernel -> the name of its kernel, as torch's error spells it."""

_FURTHER: Mapping[str, list[str]] = _TABLES["further dtypes"]
"""Dtypes that the database does not know: an H200 refused them (``benchmarks/conformance.json``)."""

GAPS: Mapping[str, list[str]] = data_files.read(__file__, "cuda_dtypes.json")
"""Operator -> the dtypes in which the CPU has a kernel and CUDA none. ``docs/make_cuda_dtypes.py`` makes the table."""

_KERNELS: Mapping[str, str] = _TABLES["kernels"]
"""The names that CUDA's kernels have in torch's errors (aten/src/ATen/native/cuda); another operator's is NAME_cuda.

They are in ``libtorch_cuda.so`` of torch 2.10 and 2.15."""

_ASSERTED = re.compile("|".join(_TABLES["asserted"]))
"""The CPU's texts for values that CUDA's kernels assert of. Values of a shape or an int are checked by the host."""

ASSERTING = frozenset(_TABLES["asserting"])
"""The operators whose CUDA kernels assert of the values of a tensor (``CUDA_KERNEL_ASSERT``)."""


def rules_of_cuda(op: Any) -> Iterator[Rule]:
    """Yield the rules of an operator: those of the table, and those derived from torch's own tables."""
    name = name_of(op)
    # Dynamically quantized layers are the host's.
    if re.match("quantized::.*_dynamic", op.name()) or is_cpu_only(op.name().removeprefix("aten::")):
        yield Rule(
            name, lambda *args, **kwargs: missing_on_cuda(op.name()), "native_functions.yaml", NotImplementedError
        )
    yield from cuda_rules.RULES.get(name, ())
    dtypes = frozenset(getattr(torch, dtype) for dtype in (*GAPS.get(name, ()), *_FURTHER.get(name, ())))
    if dtypes:
        refuses = functools.partial(_lacked, name, dtypes)
        yield Rule(name, refuses, "torch's database of operators", NotImplementedError, only=dtypes)
    if name in OPERATORS:
        refuses = functools.partial(_undetermined, name, op)
        holds = torch.are_deterministic_algorithms_enabled
        yield Rule(name, refuses, "torch.use_deterministic_algorithms", holds=holds)


_NONDETERMINISTIC_AND_WARNED = (
    "{kernel} does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True, warn_only=True)'. You can file an issue at "
    "https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic support "
    "for this operation."
)


_NONDETERMINISTIC = (
    "{kernel} does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this "
    "operation, or you can use the 'warn_only=True' option, if that's acceptable for your "
    "application. You can also file an issue at https://github.com/pytorch/pytorch/issues to help "
    "us prioritize adding deterministic support for this operation."
)


def _undetermined(name: str, op: Any, *args: Any, **kwargs: Any) -> str | None:
    """Refuse a nondeterministic kernel, or warn, as the program asks. The texts are of aten/src/ATen/Context.cpp."""
    if not (torch.are_deterministic_algorithms_enabled() and policy.stands_for_cuda()):
        return None
    if name in _CONCERNS and not _CONCERNS[name](given_to(op, args, kwargs)):
        return None
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(_NONDETERMINISTIC_AND_WARNED.format(kernel=OPERATORS[name]), stacklevel=2)
        return None
    return _NONDETERMINISTIC.format(kernel=OPERATORS[name])


def _lacked(name: str, dtypes: frozenset[torch.dtype], *args: Any, **kwargs: Any) -> str | None:
    """Refuse a dtype of a call's first tensor for which CUDA has no kernel."""
    first = next((each for each in args if isinstance(each, torch.Tensor)), None)
    if first is None or dtype_of(first) not in dtypes or not all(each.numel() for each in tensors(args)):
        return None
    kernel = _convolution(*args) if name == "convolution" else _KERNELS.get(name, f"{name}_cuda")
    return f"\"{kernel}\" not implemented for '{scalar_type(dtype_of(first))}'"


def _convolution(input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> str:
    """Return the name of the kernel that torch chooses on CUDA without cuDNN (aten/src/ATen/native/Convolution.cpp)."""
    dilation, transposed, _, groups = rest[3:]
    dims = 3 if input.dim() == 5 else 2
    if transposed:
        return f"slow_conv_transpose{dims}d_out_cuda"
    if groups > 1 and groups == input.size(1) and weight.size(0) % groups == 0:
        return "conv_depthwise2d_forward_cuda" if dims == 2 else "conv_depthwise3d"
    return "slow_conv_dilated<>" if dims == 3 or any(step != 1 for step in dilation) else "slow_conv2d_cuda"


_ON_CPU = "expected m1 and m2"
"""How the CPU's error begins for products of two dtypes (aten/src/ATen/native/LinearAlgebra.cpp)."""


def check_assertion(op: Any, error: Exception) -> None:
    """Raise the device's error where it is another than the CPU's. Where its kernel asserts, CUDA loses the device."""
    said = str(error).split("\n")[0]
    asserted = name_of(op) in ASSERTING and _ASSERTED.match(said)
    if asserted and policy.stands_for_mps():
        raise torch.AcceleratorError(said) from None
    if said.startswith(_ON_CPU) and policy.stands_for_cuda():
        raise type(error)(str(error).replace(_ON_CPU, "expected mat1 and mat2", 1)) from None
    if asserted and policy.stands_for_cuda():
        raise policy.lose(f"The kernel's assertion was: {said}") from None


MPS_GAPS: Mapping[str, list[str]] = data_files.read(__file__, "mps_dtypes.json")
"""Operator -> the dtypes in which the CPU has a kernel and MPS none. ``docs/make_mps_dtypes.py`` makes the table."""


def _projected(input: torch.Tensor, *args: Any) -> Any:
    states = next(each for each in args if isinstance(each, list))
    return states[0].size(2) != states[1].size(2) and "LSTM with projections is not currently supported with MPS."


def _convolution_of_mps(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **out: Any) -> Any:
    if dtype_of(input) is torch.int64:  # the CPU has no kernel for other integers
        return "Convolution is supported only for Floating types"
    halves = rest[4] and input.dim() == 5 and dtype_of(input) in (torch.float16, torch.bfloat16)
    return halves and "ConvTranspose 3D with BF16 or FP16 types is not supported on MPS"


def _channels(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **out: Any) -> Any:
    return weight.size(0) > 1 << 16 and "Output channels > 65536 not supported at the MPS device."


_POOLED_ON_MPS = (
    "Adaptive pool MPS: input sizes must be divisible by output sizes. Non-divisible input sizes "
    "are not implemented on MPS device yet. For now, you can manually transfer tensor to cpu in "
    "this case. Please refer to [this issue](https://github.com/pytorch/pytorch/issues/96056)"
)


def _pooled(self: torch.Tensor, output_size: list[int], *args: Any, **out: Any) -> Any:
    odd = any(size % wanted for size, wanted in zip(self.shape[-2:], output_size, strict=False) if wanted)
    return odd and _POOLED_ON_MPS


MPS_RULES = by_operator(
    Rule("lstm", _projected, "mps/operations/RnnOps.mm: _lstm_mps"),
    Rule("convolution", _convolution_of_mps, "mps/operations/Convolution.mm: _mps_convolution_impl and _transpose"),
    Rule("convolution", _channels, "mps/operations/Convolution.mm: _mps_convolution_impl", NotImplementedError),
    Rule("_adaptive_avg_pool2d", _pooled, "mps/operations/AdaptivePooling.mm"),
    holds=policy.stands_for_mps,
)


def rules_of_mps(op: Any) -> Iterator[Rule]:
    """Yield the rules of an operator: those of the table, and the dtypes that its kernel lacks."""
    name = name_of(op)
    yield from MPS_RULES.get(name, ())
    dtypes = frozenset(getattr(torch, dtype) for dtype in MPS_GAPS.get(name, ()))
    if dtypes:
        refuses = functools.partial(_lacked_by_mps, name, dtypes)
        yield Rule(name, refuses, "torch's lists for its MPS tests", TypeError, policy.stands_for_mps)


def _lacked_by_mps(name: str, dtypes: frozenset[torch.dtype], *args: Any, **kwargs: Any) -> str | None:
    found = (dtype_of(each) for each in args if isinstance(each, torch.Tensor))
    return next((_message(name, dtype) for dtype in found if dtype in dtypes), None)


def _message(name: str, dtype: torch.dtype) -> str:
    """Return a text of MPS's: of its conversion of dtypes, or of its operations. Some kernels have another text."""
    if dtype.is_complex:
        return f"Trying to convert {scalar_type(dtype)} to the MPS backend but it does not have support for that dtype."
    return f"Operation '{name}()' does not support input type '{str(dtype).removeprefix('torch.')}' in MPS backend."
