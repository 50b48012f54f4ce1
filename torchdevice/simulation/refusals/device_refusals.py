"""Calls of an operator that CUDA and MPS refuse: by rules, torch's tables, and assertions.

Operators without a deterministic kernel are those that ``torch.use_deterministic_algorithms``
documents; ``test_cuda_refusals.py`` reads its docstring. Those that the CPU has no deterministic
kernel for either, such as ``max_unpool2d``, refuse on their own. ``cumsum`` and the backward of
``ReflectionPad2d`` are documented still, but their alerts are gone from ``libtorch_cuda.so`` of
torch 2.10 and 2.15, and so is the demand for ``CUBLAS_WORKSPACE_CONFIG``.

The rules of MPS name files below ``aten/src/ATen/native`` of torch. Those of CUDA are in
``cuda_rules.py``.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchdevice.kernel.devices.scalar_types import scalar_type
from torchdevice.kernel.python import data_files
from torchdevice.kernel.stand_ins import given_to, tensors
from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of, host_alias
from torchdevice.simulation.profiles import is_cpu_only, missing_on_cuda
from torchdevice.simulation.refusals import cuda_rules
from torchdevice.simulation.refusals.refusal_rules import Rule, by_operator, name_of

_NONDETERMINISTIC_KERNELS = {
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "_adaptive_avg_pool3d_backward": "adaptive_avg_pool3d_backward_cuda",
    "_ctc_loss_backward": "ctc_loss_backward_gpu",
    "_embedding_bag_backward": "embedding_bag_backward_cuda_max",
    "adaptive_max_pool2d_backward": "adaptive_max_pool2d_backward_cuda",
    "avg_pool3d_backward": "avg_pool3d_backward_cuda",
    "bincount": "_bincount_cuda",
    "fractional_max_pool2d_backward": "fractional_max_pool2d_backward_cuda",
    "fractional_max_pool3d_backward": "fractional_max_pool3d_backward_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda",
    "grid_sampler_3d_backward": "grid_sampler_3d_backward_cuda",
    "histc": "_histc_cuda with floating point input",
    "max_pool3d_with_indices_backward": "max_pool3d_with_indices_backward_cuda",
    "median": "median CUDA with indices output",
    "nanmedian": "median CUDA with indices output",
    "nll_loss2d_forward": "nll_loss2d_forward_out_cuda_template",
    "put": "put_",
    "reflection_pad1d_backward": "reflection_pad1d_backward_out_cuda",
    "reflection_pad3d_backward": "reflection_pad3d_backward_out_cuda",
    "replication_pad1d_backward": "replication_pad1d_backward_cuda",
    "replication_pad2d_backward": "replication_pad2d_backward_cuda",
    "replication_pad3d_backward": "replication_pad3d_backward_cuda",
    "scatter_reduce": "scatter_reduce_cuda_prod_",
    "upsample_bicubic2d_backward": "upsample_bicubic2d_backward_out_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
    "upsample_linear1d_backward": "upsample_linear1d_backward_out_cuda",
    "upsample_trilinear3d_backward": "upsample_trilinear3d_backward_out_cuda",
}
"""Operators whose kernels on CUDA are nondeterministic, by the names in torch's errors."""


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

_RAISING = (torch.use_deterministic_algorithms.__doc__ or "").partition("operations will throw a")[
    2
]
"""The part of the documentation that lists operators without a deterministic kernel."""

OPERATORS: Mapping[str, str] = {
    name: kernel
    for name, kernel in _NONDETERMINISTIC_KERNELS.items()
    # torch 2.13 has a deterministic kernel.
    if name != "max_pool3d_with_indices_backward" or "torch.nn.MaxPool3d" in _RAISING
}
"""Operator without a deterministic kernel -> the name of its kernel, as torch's error spells it."""

_FURTHER: Mapping[str, Sequence[str]] = {
    "_cdist_forward": ("bfloat16", "float16"),
    "addcmul": ("complex32",),
    "native_dropout_backward": ("bool", "complex128", "complex32", "complex64"),
}
"""Dtypes that the database does not know: an H200 refused them (``benchmarks/conformance.json``).
"""

_ADDED_IN_2_14 = ("angle",)
"""Operators of which CUDA has a kernel for every dtype of the table since torch 2.14."""


def _gaps() -> dict[str, list[str]]:
    found: dict[str, list[str]] = data_files.read(__file__, "cuda_dtypes.json")
    added = _ADDED_IN_2_14 if torch.__version__ >= "2.14" else ()
    return {name: dtypes for name, dtypes in found.items() if name not in added}


GAPS: Mapping[str, list[str]] = _gaps()
"""Operator -> the dtypes in which the CPU has a kernel and CUDA none. ``docs/make_cuda_dtypes.py``
makes the table.
"""

_KERNELS: Mapping[str, str] = {
    "_cdist_forward": "cdist_cuda",
    "_trilinear": "baddbmm_cuda",
    "_upsample_bilinear2d_aa": "upsample_bilinear2d_out_frame",
    "addbmm": "addmm_cuda",
    "addmm": "addmm_cuda",
    "addmv": "addmv_impl_cuda",
    "avg_pool2d": "avg_pool2d_out_cuda_frame",
    "avg_pool3d": "avg_pool3d_out_cuda",
    "baddbmm": "baddbmm_cuda",
    "bmm": "baddbmm_cuda",
    "dot": "dot",
    "histc": "histc",
    "max_pool2d_with_indices": "max_pool2d_with_indices_out_cuda_frame",
    "max_pool3d_with_indices": "max_pool3d_with_indices_out_frame",
    "mm": "addmm_cuda",
    "mv": "addmv_impl_cuda",
    "native_dropout_backward": "masked_scale",
    "upsample_bicubic2d": "upsample_bicubic2d_out_frame",
    "upsample_bilinear2d": "upsample_bilinear2d_out_frame",
    "vdot": "dot",
}
"""The names that CUDA's kernels have in torch's errors (aten/src/ATen/native/cuda); another
operator's is NAME_cuda.

They are in ``libtorch_cuda.so`` of torch 2.10 and 2.15.
"""

_ASSERTED = re.compile(
    "|".join(
        (
            r"index -?\d+ is out of bounds for dimension",
            r"index_copy_\(\): index -?\d+ is out of bounds",
            r"index out of range in self",
            r"out of range: tried to access index",
            r"Target -?\d+ is out of bounds",
            r"Index \d+ of input takes value",
            r"embedding_bag: Expected idx >= 0",
            r"Found an invalid max index",
            r"target out of range",
            r"argument #2 'target' is out of range",
            r"probability tensor contains either",
            r"invalid Poisson rate",
            r"Expected p_in >= 0 && p_in <= 1",
            r"all elements of (?:input|target) should be between 0 and 1",
            r"repeats can not be negative",
            r"invalid multinomial distribution \(sum of probabilities",
            r"Number of elements of source < number of ones in mask",
        )
    )
)
"""The CPU's texts for values that CUDA's kernels assert of. Values of a shape or an int are checked
by the host.
"""

ASSERTING = frozenset(
    {
        "_assert_async",
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "_functional_assert_async",
        "_index_put_impl",
        "_unsafe_index",
        "_unsafe_index_put",
        "bernoulli",
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "embedding",
        "gather",
        "index",
        "index_add",
        "index_copy",
        "index_fill",
        "index_put",
        "index_reduce",
        "index_select",
        "masked_scatter",
        "max_unpool2d",
        "max_unpool3d",
        "multi_margin_loss",
        "multi_margin_loss_backward",
        "multilabel_margin_loss_forward",
        "multinomial",
        "nll_loss2d_forward",
        "nll_loss_forward",
        "poisson",
        "put",
        "repeat_interleave",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "take",
    }
)
"""The operators whose CUDA kernels assert of the values of a tensor (``CUDA_KERNEL_ASSERT``)."""


def rules_of_cuda(op: Any) -> Iterator[Rule]:
    """Yield an operator's rules: those in the table, and those derived from torch's tables."""
    name = name_of(op)
    # Dynamically quantized layers are the host's.
    is_of_host = re.match("quantized::.*_dynamic", op.name()) is not None
    if is_of_host or is_cpu_only(op.name().removeprefix("aten::")):
        yield Rule(
            name,
            lambda *args, **kwargs: missing_on_cuda(op.name()),
            "native_functions.yaml",
            NotImplementedError,
        )
    yield from cuda_rules.RULES.get(name, ())
    dtypes = frozenset(
        getattr(torch, dtype) for dtype in (*GAPS.get(name, ()), *_FURTHER.get(name, ()))
    )
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
    """Refuse a nondeterministic kernel or warn, as asked, in texts of aten/src/ATen/Context.cpp."""
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
    if (
        first is None
        or dtype_of(first) not in dtypes
        or not all(each.numel() for each in tensors(args))
    ):
        return None
    kernel = _convolution(*args) if name == "convolution" else _KERNELS.get(name, f"{name}_cuda")
    return f"\"{kernel}\" not implemented for '{scalar_type(dtype_of(first))}'"


def _convolution(input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> str:
    """Return torch's kernel on CUDA without cuDNN (aten/src/ATen/native/Convolution.cpp)."""
    dilation, transposed, _, groups = rest[3:]
    dims = 3 if input.dim() == 5 else 2
    if transposed:
        return f"slow_conv_transpose{dims}d_out_cuda"
    if groups > 1 and groups == input.size(1) and weight.size(0) % groups == 0:
        return "conv_depthwise2d_forward_cuda" if dims == 2 else "conv_depthwise3d"
    if dims == 3 or any(step != 1 for step in dilation):
        return "slow_conv_dilated<>"
    return "slow_conv2d_cuda"


_ON_CPU = "expected m1 and m2"
"""How the CPU's error begins for products of two dtypes (aten/src/ATen/native/LinearAlgebra.cpp).
"""


def _asserts_of_one(op: Any, args: Any) -> bool:
    """Return whether an operator that asserts one value is given zero. The program has the text."""
    if name_of(op) not in ("_assert_async", "_functional_assert_async"):
        return False
    value = host_alias(args[0])
    return value.numel() == 1 and not value.item()


def check_assertion(op: Any, args: Any, error: Exception) -> None:
    """Raise the device's error if it differs from the CPU's. An assertion loses a CUDA device."""
    said = str(error).split("\n")[0]
    asserted = name_of(op) in ASSERTING and (_asserts_of_one(op, args) or _ASSERTED.match(said))
    if asserted and policy.stands_for_mps():
        raise torch.AcceleratorError(said) from None
    if said.startswith(_ON_CPU) and policy.stands_for_cuda():
        raise type(error)(str(error).replace(_ON_CPU, "expected mat1 and mat2", 1)) from None
    if asserted and policy.stands_for_cuda():
        raise policy.lose(f"The kernel's assertion was: {said}") from None


MPS_GAPS: Mapping[str, list[str]] = data_files.read(__file__, "mps_dtypes.json")
"""Operator -> the dtypes in which the CPU has a kernel and MPS none. ``docs/make_mps_dtypes.py``
makes the table.
"""


def _projected(input: torch.Tensor, *args: Any) -> Any:
    states = next(each for each in args if isinstance(each, list))
    if states[0].size(2) == states[1].size(2):
        return ""
    return "LSTM with projections is not currently supported with MPS."


def _convolution_of_mps(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **out: Any) -> Any:
    if dtype_of(input) is torch.int64:  # the CPU has no kernel for other integers
        return "Convolution is supported only for Floating types"
    if rest[4] and input.dim() == 5 and dtype_of(input) in (torch.float16, torch.bfloat16):
        return "ConvTranspose 3D with BF16 or FP16 types is not supported on MPS"
    return ""


def _channels(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **out: Any) -> Any:
    if weight.size(0) <= 1 << 16:
        return ""
    return "Output channels > 65536 not supported at the MPS device."


_POOLED_ON_MPS = (
    "Adaptive pool MPS: input sizes must be divisible by output sizes. Non-divisible input sizes "
    "are not implemented on MPS device yet. For now, you can manually transfer tensor to cpu in "
    "this case. Please refer to [this issue](https://github.com/pytorch/pytorch/issues/96056)"
)


def _pooled(self: torch.Tensor, output_size: list[int], *args: Any, **out: Any) -> Any:
    odd = any(
        size % wanted for size, wanted in zip(self.shape[-2:], output_size, strict=False) if wanted
    )
    return odd and _POOLED_ON_MPS


MPS_RULES = by_operator(
    Rule("lstm", _projected, "mps/operations/RnnOps.mm: _lstm_mps"),
    Rule(
        "convolution",
        _convolution_of_mps,
        "mps/operations/Convolution.mm: _mps_convolution_impl and _transpose",
    ),
    Rule(
        "convolution",
        _channels,
        "mps/operations/Convolution.mm: _mps_convolution_impl",
        NotImplementedError,
    ),
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
        yield Rule(
            name, refuses, "torch's lists for its MPS tests", TypeError, policy.stands_for_mps
        )


def _lacked_by_mps(
    name: str, dtypes: frozenset[torch.dtype], *args: Any, **kwargs: Any
) -> str | None:
    found = (dtype_of(each) for each in args if isinstance(each, torch.Tensor))
    return next((_message(name, dtype) for dtype in found if dtype in dtypes), None)


def _message(name: str, dtype: torch.dtype) -> str:
    """Return a text of MPS about dtypes or operations. Some kernels have others."""
    if dtype.is_complex:
        return (
            f"Trying to convert {scalar_type(dtype)} to the MPS backend but it does not have "
            "support for that dtype."
        )
    return (
        f"Operation '{name}()' does not support input type '{str(dtype).removeprefix('torch.')}' "
        "in MPS backend."
    )
