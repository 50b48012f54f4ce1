"""Dtypes in which CUDA has a kernel and the CPU has none: the call is made again in a wider dtype.

There is no check before a call: torch's error names the missing kernel and the dtype. Only listed
kernels and dtypes are tried again, and a kernel that CUDA lacks too stays an error.
``tests/engines/test_dtype_gaps.py`` holds the list against torch's own database of operators, the
difference between its ``dtypesIfCUDA`` and ``dtypes``.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.stand_ins import Converted


class Lacking(NamedTuple):
    """A kernel and dtype that the CPU lacks, by its error.

    Attributes:
        wider: The dtypes to compute in, by the dtypes that are given.
        fidelity: How close that comes to CUDA.
        done: The replacement, in a few words.
        rounded: Whether results come back in the dtype that was given.
    """

    wider: Mapping[torch.dtype, torch.dtype]
    fidelity: Fidelity
    done: str
    rounded: bool = True


_IN_FLOAT32 = Lacking(
    {torch.float16: torch.float32, torch.complex32: torch.complex64},
    Fidelity.EXACT,
    "computed in float32 and rounded once, as CUDA's kernels do",
)
_BFLOAT16_IN_FLOAT32 = Lacking(
    {torch.bfloat16: torch.float32},
    Fidelity.EXACT,
    "computed in float32 and rounded once, as CUDA's kernels do",
)
_IN_UINT8 = Lacking({torch.bool: torch.uint8}, Fidelity.EXACT, "computed in uint8, which is exact")
_FFT = Lacking(
    {torch.float16: torch.float32, torch.complex32: torch.complex64},
    Fidelity.APPROXIMATE,
    "computed in float32, where cuFFT computes in float16",
)
_FFT_OF_BFLOAT16 = Lacking(
    {torch.bfloat16: torch.float32},
    Fidelity.EXACT,
    "computed in float32, as CUDA does, whose result is float32 too",
    rounded=False,
)
_BY_OTHER_OPERATORS = Lacking({}, Fidelity.EXACT, "computed by other operators, exactly")

_FLOAT8 = {
    name: Lacking(
        {getattr(torch, name): torch.float32}, Fidelity.EXACT, "moved as float32, which is exact"
    )
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
}

# Float16 has 11 bits of precision, so rounding from float32 happens once.
_HALF = _IN_FLOAT32.wider

_OF_COMPLEX_HALF = (
    "acos_vml_cpu",
    "acosh_cpu",
    "asin_vml_cpu",
    "asinh_cpu",
    "atan_vml_cpu",
    "atanh_cpu",
    "cos_vml_cpu",
    "cosh_cpu",
    "div_cpu",
    "exp_vml_cpu",
    "log_vml_cpu",
    "logaddexp_cpu",
    "pow",
    "sin_vml_cpu",
    "sinh_cpu",
    "tan_vml_cpu",
    "tanh_vml_cpu",
    "rsqrt_cpu",
    "sqrt_vml_cpu",
    "lerp_kernel_scalar",
    "lerp_kernel_tensor",
    "angle_cpu",
    "trace",
    "sigmoid_cpu",
    "sigmoid_backward_cpu",
    "tanh_backward_cpu",
    "prod_out_cpu",
    "sum_cpu",
)

_OF_HALF_AND_BFLOAT16 = (
    "avg_pool3d_out_frame",
    "avg_pool3d_backward_out_frame",
    "compute_index_ranges_weights",
    "multi_margin_loss_cpu_kernel",
    "multi_margin_loss_backward_cpu_kernel",
    "multilabel_margin_loss_forward_out_frame",
    "multilabel_margin_loss_backward_out_frame",
    "upsample_bilinear2d_aa_backward_cpu",
    "trace",
    "addmm_out_sparse_csr_impl_mkl",
    "addmm_out_sparse_csr_impl_mkl_sparse",
    "addmv_out_sparse_csr_impl_mkl",
    "sparse_matmul",
)

KERNELS: dict[tuple[str, str], Lacking] = {
    **{(kernel, "ComplexHalf"): _IN_FLOAT32 for kernel in _OF_COMPLEX_HALF},
    **{
        (kernel, "Half"): _IN_FLOAT32
        for kernel in (*_OF_HALF_AND_BFLOAT16, "rrelu_with_noise_out_cpu")
    },
    **{(kernel, "BFloat16"): _BFLOAT16_IN_FLOAT32 for kernel in _OF_HALF_AND_BFLOAT16},
    **{(kernel, "Bool"): _IN_UINT8 for kernel in ("abs_cpu", "trace")},
    **{
        ("histogram_cpu", dtype): _BY_OTHER_OPERATORS
        for dtype in ("Byte", "Char", "Short", "Int", "Long")
    },
}
"""Kernel and dtype as the error names them -> the replacement."""

TEXTS: dict[str, Lacking] = {
    "Unsupported dtype Half": _FFT,
    "MKL FFT doesn't support tensors of type: Half": _FFT,
    "nansum on CPU does not support complex inputs": _BY_OTHER_OPERATORS,
}
"""Errors with a text of their own."""

_NOT_FLOATING = (
    "sparse_sampled_addmm: Expected self to be a floating-point or complex tensor, but got"
)

# CUDA lacks some kernels in earlier releases too.
if torch.__version__ >= "2.14":  # torch 2.14 and later
    TEXTS |= {
        "Unsupported dtype BFloat16": _FFT_OF_BFLOAT16,
        "MKL FFT doesn't support tensors of type: BFloat16": _FFT_OF_BFLOAT16,
        f"{_NOT_FLOATING} Half": _IN_FLOAT32,
        f"{_NOT_FLOATING} BFloat16": _BFLOAT16_IN_FLOAT32,
    }
if torch.__version__ >= "2.15":  # torch 2.15 and later
    KERNELS |= {
        ("scatter_gather_tensor_cpu", name.capitalize()): each for name, each in _FLOAT8.items()
    }

LEFT_OUT: Mapping[str, str] = {
    "torch.ops.aten._flash_attention_forward": (
        "private; scaled_dot_product_attention runs by the CPU's kernels"
    ),
    "torch.ops.aten._efficient_attention_forward": (
        "private; scaled_dot_product_attention runs by the CPU's kernels"
    ),
    "sgn": (
        "complex32: the derivative divides inside the autograd engine, which reports no call to "
        "make again on a CPU target"
    ),
    "to_sparse": (
        "float16 and bfloat16: the derivative fills a sparse tensor, which the CPU lacks in these "
        "dtypes"
    ),
}
"""Operators of torch's database with dtypes that only CUDA has, which raise torch's error here:
name -> reason.
"""

ASKED_LAST = frozenset(
    {
        "_upsample_bilinear2d_aa",
        "abs",
        "absolute",
        "avg_pool3d",
        "histc",
        "interpolate",
        "logaddexp",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "nanmean",
        "nansum",
        "rrelu",
        "scatter",
        "softsign",
        "sparse_sampled_addmm",
        "stft",
        "trace",
    }
)
"""Names of the functions that ``engine="wrap"`` watches for this, beside those of ``torch.fft``.
Watching takes a tenth of a microsecond, so functions that are short and lack nothing but complex32
are left alone.
"""

# Fullmatch below: an error that only quotes this is the program's.
_NOT_IMPLEMENTED = re.compile(r'"(\w+)" not implemented for \'(\w+)\'')
_WIDER_PRODUCT = re.compile(
    "Could not run 'aten::(|b|add|baddb)mm[.]dtype(_out)?' with arguments from the 'CPU'"
)
_COMPUTING = ("torch.nn.functional", "torch.functional", "torch._tensor")


def lacking(error: BaseException) -> Lacking | None:
    """Return the missing kernel that an error names, if CUDA has it and it is replaced here."""
    text = error.args[0] if error.args else None
    if not isinstance(text, str):  # an error of the program's, which may have no text
        return None
    found = _NOT_IMPLEMENTED.fullmatch(text)
    if _WIDER_PRODUCT.match(text):
        return _BY_OTHER_OPERATORS
    return KERNELS.get((found[1], found[2])) if found else TEXTS.get(text)


def can_be_repeated(func: Any) -> bool:
    """Return whether a function only computes. Some of those written in Python do more."""
    # Python functions of these modules only compose operators; others may have effects that must
    # not come twice.
    if isinstance(func, types.FunctionType):
        return func.__module__ in _COMPUTING and func.__name__ != "backward"
    return True


def asked_last(func: Any) -> bool:
    """Return whether ``engine="wrap"`` calls the mode for a function only after torch's failed."""
    name = func.__name__
    return name.removesuffix("_") in ASKED_LAST or name.startswith("fft_")


def compute(
    context: Context | None,
    lacked: Lacking,
    func: Callable[..., Any],
    name: str,
    args: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    """Make a call again in a way for which the CPU has kernels.

    Args:
        context: The active context, which reports it; None where there is none.
        lacked: The missing kernel.
        func: The function that was called.
        name: The operator's name, without a namespace.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    if context is not None:
        context.report(
            f"{name} in a dtype without a kernel on the CPU", lacked.done, lacked.fidelity
        )
    # Functions that no wider dtype computes are written out below.
    other = _OTHERWISE.get(name)
    if other is not None and not lacked.wider:
        named = {**kwargs}
        out = named.pop("out", None)
        found = other(*args, **named)
        return found if out is None else out.resize_(found.shape).copy_(found)
    return _Wider(func, lacked.wider, lacked.rounded).call(args, kwargs)


class _Wider(Converted):
    """A call in wider dtypes: arguments are widened, results and written arguments narrowed."""

    def __init__(self, func: Any, wider: Mapping[torch.dtype, torch.dtype], rounded: bool = True):
        super().__init__(func)
        self._wider = wider
        self._narrower = {wide: narrow for narrow, wide in wider.items()} if rounded else {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._wider.get(tensor.dtype, tensor.dtype))

    def other(self, value: Any) -> Any:
        return self._wider.get(value, value) if isinstance(value, torch.dtype) else value

    def back(self, result: torch.Tensor) -> torch.Tensor:
        return result.to(self._narrower.get(result.dtype, result.dtype))


# ---- by other operators --------------------------------------------------------------------------


def _histc(input: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:
    """``torch.histc`` of integers, as ``getBin`` of ATen/native/cuda/SummaryOps.cu computes it."""
    # Int64, so that the product with the number of bins cannot overflow narrow integers.
    values = input.flatten().long()
    least, most = int(min), int(max)
    if least == most and values.numel():
        least = int(values.min())
        most = int(values.max())
    # As CUDA does for a histogram of equal values.
    if least == most:
        least, most = least - 1, most + 1
    inside = values[(values >= least) & (values <= most)]
    # The largest value belongs to the last bin.
    places = torch.div((inside - least) * bins, most - least, rounding_mode="floor").clamp(
        max=bins - 1
    )
    return torch.bincount(places, minlength=bins).to(input.dtype)


def _nansum(
    input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``torch.nansum`` of complex numbers."""
    filled = torch.where(
        input.isnan(), torch.zeros((), dtype=input.dtype, device=input.device), input
    )
    wider = _Wider(torch.sum, _HALF if input.dtype is torch.complex32 else {})
    return wider.call((filled, dim, keepdim), {"dtype": dtype})


def _nanmean(
    input: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """``torch.nanmean`` of complex numbers, composed as torch composes it."""
    count = torch.sum(~input.isnan(), dim, keepdim)
    total = _nansum(input, dim, keepdim, dtype=dtype)
    return _Wider(torch.div, _HALF if total.dtype is torch.complex32 else {}).call(
        (total, count), {}
    )


def _product(function: Callable[..., Any], *args: Any, out_dtype: Any = None, **named: Any) -> Any:
    """A product with ``out_dtype``, of the factors' own or float32: CUDA sums halves in float32."""
    wide = next((each for each in args if isinstance(each, torch.dtype)), out_dtype)
    wider = _Wider(function, {torch.float16: wide, torch.bfloat16: wide}, rounded=False)
    return wider.call([each for each in args if each is not wide], named)


_OTHERWISE: dict[str, Callable[..., Any]] = {
    "histc": _histc,
    "nansum": _nansum,
    "nanmean": _nanmean,
}
PRODUCTS = (torch.mm, torch.bmm, torch.addmm, torch.baddbmm)
"""Products that take ``out_dtype``, for which no CPU has kernels."""

for _function in PRODUCTS:
    _OTHERWISE[_function.__name__] = functools.partial(_product, _function)
