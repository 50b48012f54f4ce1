"""The rules of CUDA's kernels and libraries.

Each rule names its source: a file below ``aten/src/ATen/native`` of torch, whose ``TORCH_CHECK`` it
repeats.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.kernel.devices.device_strings import tensor_type
from torchdevice.kernel.devices.scalar_types import scalar_type
from torchdevice.kernel.stand_ins import tensors
from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of
from torchdevice.simulation.kernels.recurrent_networks import is_on_cudnn
from torchdevice.simulation.refusals.refusal_rules import Rule, by_operator

_INT_MAX = 2**31 - 1

_HALVES = (torch.float16, torch.complex32)

_LOW = (torch.float16, torch.bfloat16)

_COMPLEX = frozenset({torch.complex64, torch.complex128})
_WITHOUT_TOPK = _COMPLEX.union([torch.bool, torch.complex32])
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_SUMMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)

_NO_HALF = "HalfTensor is not supported"

_FLOAT8 = (8, 9)
"""The capability from which GPUs have units for float8."""


def _type(tensor: torch.Tensor) -> str:
    return tensor_type(scalar_type(dtype_of(tensor)), "cuda" if tensor.get_device() >= 0 else "cpu")


def _parameters(input: torch.Tensor, *parameters: Any, **out: Any) -> str:
    """Refuse parameters of another dtype than the input's: the kernels of norms take one dtype."""
    return _other_than(dtype_of(input), parameters)


def _of_groups(input: torch.Tensor, *parameters: Any, **out: Any) -> str:
    """Refuse float32 parameters for a lower input; for other dtypes the CPU's error is CUDA's."""
    floats = [each for each in tensors(parameters) if dtype_of(each) is torch.float32]
    return _other_than(dtype_of(input), floats) if dtype_of(input) in _LOW else ""


_DTYPES_OF_CUDNN_BATCHES = (
    "Expected tensor for argument {} to have the same type as tensor for argument {}; but type {} "
    "does not equal {} (while checking arguments for cudnn_batch_norm)"
)


def _of_batch(
    input: torch.Tensor, weight: Any = None, bias: Any = None, *rest: Any, **out: Any
) -> str:
    """Refuse parameters of neither the input's dtype nor its sums', and such cuDNN statistics."""
    if weight is None:
        return ""
    own, kind = dtype_of(input), dtype_of(weight)
    has_bfloat16 = torch.bfloat16 in (own, kind)
    takes = not has_bfloat16 and (kind is torch.float32 or own is not torch.float16)
    if takes and input.dim() > 2 and torch._C._get_cudnn_enabled():
        return _of_cudnn_batch(input, weight, bias, *rest)
    wanted = torch.float32 if own in _LOW and kind is not own else own
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None and dtype_of(each) != wanted:
            return (
                f"Expected {name} to have type {scalar_type(wanted)} but got "
                f"{scalar_type(dtype_of(each))}"
            )
    return ""


_OF_BATCH = ("#1 'input'", "#2 'weight'", "#3 'bias'", "#4 'running_mean'", "#5 'running_var'")


def _of_cudnn_batch(input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> str:
    """Refuse parameters of several dtypes, in the order in which torch compares them for cuDNN."""
    of_input, of_weight, *others = zip(_OF_BATCH, (input, weight, *rest), strict=False)
    pairs = [(of_weight, each) for each in others]
    if dtype_of(input) is not torch.float16:
        pairs.insert(0, (of_input, of_weight))
    for (one, first), (other, second) in pairs:
        if isinstance(second, torch.Tensor) and dtype_of(first) != dtype_of(second):
            return _DTYPES_OF_CUDNN_BATCHES.format(one, other, _type(first), _type(second))
    return ""


def _other_than(dtype: torch.dtype, parameters: Any) -> str:
    other = next((dtype_of(each) for each in tensors(parameters) if dtype_of(each) != dtype), None)
    if other is None:
        return ""
    return f"expected scalar type {scalar_type(dtype)} but found {scalar_type(other)}"


def _convolution(
    input: torch.Tensor, weight: torch.Tensor, bias: Any = None, *rest: Any, **out: Any
) -> str:
    # Every convolution comes by here: two comparisons decide most calls.
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (
            dtype_of(other) != dtype_of(input) or other.is_cpu != input.is_cpu
        ):
            return (
                f"Input type ({_type(input)}) and {name} type ({_type(other)}) should be the same"
            )
    return ""


def _int_mm(self: torch.Tensor, mat2: torch.Tensor, **out: Any) -> Any:
    multiple = "needs to be greater than 0 and a multiple of 8, but got"
    if self.dim() != 2 or mat2.dim() != 2:
        return ""  # the CPU's error
    rows, inner = self.shape
    columns = mat2.size(1)
    if rows <= 16:
        return f"self.size(0) needs to be greater than 16, but got {rows}"
    if inner % 8:
        return f"self.size(1) {multiple} {inner}"
    return f"mat2.size(1) {multiple} {columns}" if columns % 8 else ""


_PRODUCTS_WITHOUT_FLOAT8 = (
    "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or "
    "ROCm MI300+"
)


def _scaled_mm(self: torch.Tensor, mat2: torch.Tensor, *rest: Any, **named: Any) -> Any:
    capability = policy.capability(self)
    if capability is not None and capability < _FLOAT8:
        return _PRODUCTS_WITHOUT_FLOAT8
    one = "x".join(map(str, self.shape))
    other = "x".join(map(str, mat2.shape))
    if self.size(1) % 16:
        return (
            "Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: "
            f"({one})."
        )
    if mat2.size(0) % 16 or mat2.size(1) % 16:
        return f"mat2 shape ({other}) must be divisible by 16"
    if capability == (9, 0) and (self.stride(1) != 1 or mat2.stride(0) != 1):
        return "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"
    return ""


def _two_e5m2(self: torch.Tensor, mat2: torch.Tensor, *rest: Any, **named: Any) -> Any:
    if dtype_of(self) is dtype_of(mat2) is torch.float8_e5m2:
        return "Multiplication of two Float8_e5m2 matrices is not supported"
    return ""


_HALF_OF_CUFFT = (
    "cuFFT only supports dimensions whose sizes are powers of two when computing in half "
    "precision, but got a signal size of{sizes}"
)


def _odd_sizes(sizes: Any) -> Any:
    if any(size & (size - 1) for size in sizes):
        return _HALF_OF_CUFFT.format(sizes=list(sizes))
    return ""


def _fft(
    self: torch.Tensor, dim: list[int], normalization: int, last: Any = None, **out: Any
) -> Any:
    if dtype_of(self) not in _HALVES:
        return ""
    sizes = [self.size(each) for each in dim]
    if type(last) is int:  # of `_fft_c2r`, whose result decides
        sizes[-1] = last
    return _odd_sizes(sizes)


def _fft_of_reals(
    self: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None, **out: Any
) -> Any:
    return dtype_of(self) is torch.float16 and _odd_sizes([self.size(dim) if n is None else n])


def _ffts_of_reals(
    self: torch.Tensor, s: Any = None, dim: Any = None, norm: Any = None, **out: Any
) -> Any:
    if dtype_of(self) is not torch.float16:
        return ""
    if s:
        return _odd_sizes(s)
    return _odd_sizes([self.size(each) for each in (range(self.dim()) if dim is None else dim)])


_DRIVER_OF_SVD = (
    "torch.linalg.svd: unknown svd driver {driver} in svd_cusolver computation. Check doc at "
    "https://pytorch.org/docs/stable/generated/torch.linalg.svd.html"
)


def _svd(A: torch.Tensor, *rest: Any, driver: str | None = None, **out: Any) -> Any:
    if driver in (None, "gesvd", "gesvdj", "gesvda"):
        return ""
    return _DRIVER_OF_SVD.format(driver=driver)


def _hermitian(LD: torch.Tensor, *rest: Any, hermitian: bool = False, **out: Any) -> Any:
    if not (hermitian and dtype_of(LD).is_complex):
        return ""
    refused = "complex tensors with hermitian=True flag are not supported on CUDA."
    return f"torch.linalg.ldl_solve: {refused}"


def _lstsq(
    self: torch.Tensor, b: torch.Tensor, *rest: Any, driver: str | None = None, **out: Any
) -> Any:
    if driver is None or driver.lower() == "gels":
        return ""
    return "torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA"


def _place(tensor: torch.Tensor) -> str:
    return "cpu" if tensor.is_cpu else policy.spelled(tensor.get_device())


_NETWORK_OF_TWO_DTYPES = (
    "Input and {name} tensors are not the same dtype, found input tensor with {own} and {name} "
    "tensor with {other}"
)


_NETWORK_ON_TWO_DEVICES = (
    "Input and {name} tensors are not at the same device, found input tensor at {own} and {name} "
    "tensor at {other}"
)


def _network(input: torch.Tensor, *args: Any) -> Any:
    """Refuse states and weights of another device or dtype than the input, or with gaps."""
    if not is_on_cudnn(input):
        return ""
    # After the sizes of batches.
    states = next(each for each in args if isinstance(each, list) or each.dim() > 1)
    states = states if isinstance(states, list) else [states]
    weights = [each for each in args if isinstance(each, list)][-1]
    place, kind = _place(input), scalar_type(dtype_of(input))
    for name, each in [("hidden", state) for state in states] + [
        ("parameter", weight) for weight in weights
    ]:
        if _place(each) != place:
            return _NETWORK_ON_TWO_DEVICES.format(name=name, own=place, other=_place(each))
        if dtype_of(each) is not dtype_of(input):
            return _NETWORK_OF_TWO_DTYPES.format(
                name=name, own=kind, other=scalar_type(dtype_of(each))
            )
    gaps = [
        name for name, state in zip(("hx", "cx"), states, strict=False) if not state.is_contiguous()
    ]
    return f"rnn: {gaps[0]} is not contiguous" if gaps else ""


def _reduced(self: torch.Tensor, dim: int, index: Any, src: Any, reduce: str, **named: Any) -> Any:
    dtype = dtype_of(self)
    refused: tuple[str, ...] = ()
    if dtype is torch.bool:
        refused = ("amax", "amin", "prod")
    elif dtype.is_complex:
        refused = ("mean", "prod")
    if reduce not in refused:
        return ""
    return f"\"cuda_scatter_gather_base_kernel_func\" not implemented for '{scalar_type(dtype)}'"


def _bags(weight: torch.Tensor, *rest: Any, **named: Any) -> str:
    # After the indices, the offsets, and four settings.
    return _other_than(dtype_of(weight), rest[5:6])


def _integers(
    input: torch.Tensor, weight: Any, bias: Any, stride: Any, padding: Any, *rest: Any, **out: Any
) -> Any:
    """Refuse integers as cuDNN does: torch convolves with it unless output padding is large."""
    dtype, (_, transposed, output_padding, _) = dtype_of(input), rest[-4:]
    if dtype.is_floating_point or dtype.is_complex or not torch._C._get_cudnn_enabled():
        return ""
    if transposed and any(more >= step for more, step in zip(output_padding, stride, strict=False)):
        return ""
    if dtype in (torch.int16, torch.int64):
        return f"getCudnnDataTypeFromScalarType() not supported for {scalar_type(dtype)}"
    return "GET was unable to find an engine to execute this computation"


def _sparse_product(*given: torch.Tensor, **scalars: Any) -> Any:
    sparse, other = given[-2:]
    if not sparse.is_sparse or other.is_sparse or dtype_of(sparse) in _SUMMED:
        return ""
    return f"\"addmm_sparse_cuda\" not implemented for '{scalar_type(dtype_of(sparse))}'"


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any
) -> Any:
    three, head = (query, key, value), query.size(-1)
    if (policy.capability(query) or (8, 0)) < (8, 0):
        return "FlashAttention only supports Ampere GPUs or newer."
    if dtype_of(query) not in _LOW:
        return "FlashAttention only support fp16 and bf16 data type"
    if len(set(map(dtype_of, three))) > 1:
        return "query and key must have the same dtype"
    if any(each.stride(-1) != 1 for each in three):
        return "Input tensor must have contiguous last dimension"
    if head % 8:
        return "head_size must be a multiple of 8, this is ensured by padding!"
    if head > 256:
        return "FlashAttention forward only supports head dimension at most 256"
    return ""


def _sorted_size(self: torch.Tensor, args: Any, named: Any) -> int:
    dim = next((each for each in args if type(each) is int), named.get("dim", -1))
    return self.size(dim) if self.dim() else 1


def _too_long(self: torch.Tensor, *args: Any, **named: Any) -> Any:
    if _sorted_size(self, args, named) <= _INT_MAX:
        return ""
    return "The dimension being sorted can not have more than INT_MAX elements."


def _sorted(self: torch.Tensor, *args: Any, **named: Any) -> str:
    if dtype_of(self) not in _COMPLEX:
        return ""
    return "Sort currently does not support complex dtypes on CUDA."


def _sorted_halves(self: torch.Tensor, *args: Any, **named: Any) -> str:
    """Refuse complex32 as the kernels do, which are chosen by ``should_use_small_sort``."""
    if dtype_of(self) is not torch.complex32:
        return ""
    kernel = "sortKeyValueInplace" if _sorted_size(self, args, named) <= 4096 else "sort"
    return f"\"{kernel}\" not implemented for 'ComplexHalf'"


def _largest(self: torch.Tensor, *args: Any, **named: Any) -> str:
    dtype = dtype_of(self)
    if dtype not in _WITHOUT_TOPK:
        return ""
    return f"\"topk_out_cuda\" not implemented for '{scalar_type(dtype)}'"


RULES = by_operator(
    Rule(
        "convolution",
        _convolution,
        "Convolution.cpp: check_input_same_type_as_parameters",
        only=frozenset(),
    ),
    Rule(
        "native_layer_norm",
        _parameters,
        "cuda/layer_norm_kernel.cu: const_data_ptr<T>()",
        only=frozenset(),
    ),
    Rule(
        "native_group_norm",
        _of_groups,
        "cuda/group_norm_kernel.cu: const_data_ptr<T>()",
        only=frozenset(),
    ),
    Rule(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
        "_batch_norm_with_update",
        _of_batch,
        "cuda/Normalization.cu: is_mixed_type",
        only=frozenset(),
    ),
    Rule("_int_mm", _int_mm, "cuda/Blas.cpp: _int_mm_out_cuda"),
    Rule("_scaled_mm _scaled_mm_v2", _scaled_mm, "cuda/ScaledBlas.cpp: _scaled_mm_out_cuda"),
    Rule(
        "_scaled_mm _scaled_mm_v2",
        _two_e5m2,
        "cuda/ScaledBlas.cpp: _scaled_mm_out_cuda",
        ValueError,
    ),
    Rule("_fft_r2c _fft_c2c _fft_c2r", _fft, "cuda/CuFFTPlanCache.h: CuFFTConfig"),
    Rule(
        "fft_fft fft_ifft fft_rfft fft_ihfft", _fft_of_reals, "cuda/CuFFTPlanCache.h: CuFFTConfig"
    ),
    Rule(
        "fft_fft2 fft_ifft2 fft_rfft2 fft_fftn fft_ifftn fft_rfftn",
        _ffts_of_reals,
        "cuda/CuFFTPlanCache.h",
    ),
    Rule("_linalg_svd", _svd, "cuda/linalg/BatchLinearAlgebraLib.cpp: svd_cusolver"),
    Rule("linalg_ldl_solve", _hermitian, "cuda/linalg/BatchLinearAlgebra.cpp: ldl_solve_kernel"),
    Rule(
        "histc",
        lambda self, *rest, **named: dtype_of(self) is torch.float16 and _NO_HALF,
        "cuda/SummaryOps.cu",
    ),
    Rule("linalg_lstsq", _lstsq, "BatchLinearAlgebra.cpp: get_default_lstsq_driver"),
    Rule(
        "lstm gru rnn_tanh rnn_relu", _network, "RNN.h: check_attributes; cudnn/RNN.cpp: _cudnn_rnn"
    ),
    Rule(
        "_embedding_bag _embedding_bag_forward_only",
        _bags,
        "cuda/EmbeddingBag.cu",
        only=frozenset(),
    ),
    Rule("convolution", _integers, "cudnn/ConvShared.cpp", only=_INTEGERS),
    Rule("scatter_reduce", _reduced, "cuda/ScatterGatherKernel.cu", NotImplementedError),
    Rule(
        "_flash_attention_forward _scaled_dot_product_flash_attention",
        _flash,
        "flash_attn/flash_api.cpp: mha_fwd",
    ),
    Rule("sort", _too_long, "cuda/Sort.cpp: sort_cuda_kernel"),
    Rule("sort", _sorted, "cuda/Sort.cpp: sort_cuda_kernel", only=_COMPLEX),
    Rule(
        "sort",
        _sorted_halves,
        "cuda/Sort.cu, SortStable.cu",
        NotImplementedError,
        only=frozenset({torch.complex32}),
    ),
    Rule("topk", _largest, "cuda/TensorTopK.cu", NotImplementedError, only=_WITHOUT_TOPK),
)

_SOLVER_OF_SPARSE_TENSORS = (
    "Calling linear solver with sparse tensors requires compiling PyTorch with CUDA cuDSS and is "
    "not supported in ROCm build."
)


_SOLVER = Rule(
    "_spsolve", lambda *args, **named: _SOLVER_OF_SPARSE_TENSORS, "sparse/cuda/SparseBlasImpl.cpp"
)

_PRODUCT = Rule(
    "mm addmm _sparse_addmm",
    _sparse_product,
    "sparse/cuda/SparseCUDATensorMath.cu",
    NotImplementedError,
)

OF_SPARSE = by_operator(_PRODUCT, _SOLVER)
"""The rules of sparse tensors."""

COMPOSED = tuple(name for name in RULES if name.startswith("fft_"))
"""Operators with rules that torch composes of others for every device."""
