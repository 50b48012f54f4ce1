"""What CUDA refuses of an operator: its rules, with those derived from torch's own tables, and assertions of values."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchdevice.foundation import data_files
from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of
from torchdevice.simulation.profiles import cpu_only_operators, missing_on_cuda
from torchdevice.simulation.refusals import cuda_rules, nondeterminism
from torchdevice.simulation.refusals.cuda_errors import DEVICE_ASSERT, cuda_error
from torchdevice.simulation.refusals.rules import SCALAR_TYPES, Kernel, Rule, name_of

GAPS: Mapping[str, list[str]] = data_files.read(__file__, "cuda_dtypes.json")
"""Operator -> the dtypes in which the CPU has a kernel and CUDA none. ``docs/make_cuda_dtypes.py`` makes the table."""

_KERNELS = {
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
    "linalg_vector_norm": "norm_cuda",
    "max_pool2d_with_indices": "max_pool2d_with_indices_out_cuda_frame",
    "max_pool3d_with_indices": "max_pool3d_with_indices_out_frame",
    "mm": "addmm_cuda",
    "mv": "addmv_impl_cuda",
    "upsample_bicubic2d": "upsample_bicubic2d_out_frame",
    "upsample_bilinear2d": "upsample_bilinear2d_out_frame",
    "vdot": "vdot",
}
"""The names that CUDA's kernels have in torch's errors (aten/src/ATen/native/cuda); another operator's is NAME_cuda.

They are in ``libtorch_cuda.so`` of torch 2.10 and 2.15."""

_OUT_OF_BOUNDS = (
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
    r"Expected p_in >= 0 && p_in <= 1",
    r"all elements of (?:input|target) should be between 0 and 1",
    r"repeats can not be negative",
    r"Expected Tensor with single nonzero value",
    r"Number of elements of source < number of ones in mask",
)
_ASSERTED = re.compile("|".join(_OUT_OF_BOUNDS))
"""The CPU's texts for values that CUDA's kernels assert of. Values of a shape or an int are checked by the host."""

_ASSERTING = frozenset(
    {
        "_assert_async",
        "_embedding_bag",
        "_embedding_bag_forward_only",
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
        "_index_put_impl",
        "_unsafe_index",
        "_unsafe_index_put",
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
        "put",
        "repeat_interleave",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "take",
    }
)
"""The operators whose CUDA kernels assert of the values of a tensor (``CUDA_KERNEL_ASSERT``)."""


def rules_of(op: Any) -> Iterator[Rule]:
    """Yield the rules of an operator: those of the table, and those derived from torch's own tables."""
    name = name_of(op)
    if _lacks(op):
        yield Rule(
            name, lambda *args, **kwargs: missing_on_cuda(op.name()), "native_functions.yaml", NotImplementedError
        )
    yield from cuda_rules.RULES.get(name, ())
    if name in GAPS:
        dtypes = frozenset(getattr(torch, dtype) for dtype in GAPS[name])
        yield Rule(name, functools.partial(_lacked, name, dtypes), "torch's database of operators", NotImplementedError)
    found = nondeterminism.OPERATORS.get(name)
    if found is not None:
        yield Rule(name, functools.partial(_undetermined, found, op), "torch.use_deterministic_algorithms")


def _lacks(op: Any) -> bool:
    """Return whether CUDA has no kernel for an operator, in any dtype."""
    name = op._schema.name.removeprefix("aten::")
    overload = f"{name}.{op._overloadname}" if op._overloadname != "default" else name
    return overload in cpu_only_operators()


def _undetermined(found: nondeterminism.Nondeterministic, op: Any, *args: Any, **kwargs: Any) -> str | None:
    """Refuse a nondeterministic kernel, or warn, where the program asks for deterministic ones."""
    asked = torch.are_deterministic_algorithms_enabled() and policy.stands_for_cuda()
    return nondeterminism.refusal(found, op, args, kwargs) if asked else None


def _lacked(name: str, dtypes: frozenset[torch.dtype], *args: Any, **kwargs: Any) -> str | None:
    """Refuse a dtype of a call's first tensor for which CUDA has no kernel."""
    first = next((each for each in args if isinstance(each, torch.Tensor)), None)
    if first is None or dtype_of(first) not in dtypes or not first.numel():
        return None
    kernel = _convolution(*args) if name == "convolution" else _KERNELS.get(name, f"{name}_cuda")
    return f"\"{kernel}\" not implemented for '{SCALAR_TYPES[dtype_of(first)]}'"


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> str:
    """Return the name of the kernel that torch chooses on CUDA without cuDNN (aten/src/ATen/native/Convolution.cpp)."""
    dims = 3 if input.dim() == 5 else 2
    if transposed:
        return f"slow_conv_transpose{dims}d_out_cuda"
    if groups > 1 and groups == input.size(1) and weight.size(0) % groups == 0:
        return "conv_depthwise2d_forward_cuda" if dims == 2 else "conv_depthwise3d"
    if dims == 3 or any(step != 1 for step in dilation):
        return "slow_conv_dilated<>"
    return "slow_conv2d_cuda"


def asserting(op: Any, kernel: Kernel) -> Kernel:
    """Return a kernel whose errors for values are CUDA's assertions, if the operator's kernel asserts of values.

    After an assertion the device is lost.
    """
    if name_of(op) not in _ASSERTING:
        return kernel

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            text = str(error).split("\n")[0]
            if not (policy.stands_for_cuda() and _ASSERTED.match(text)):
                raise
            why = f"The kernel's assertion was: {text}"
            policy.lose(why)
            raise cuda_error(DEVICE_ASSERT, why) from None

    return run
