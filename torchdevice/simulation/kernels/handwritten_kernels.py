"""Kernels beyond the CPU's: allocation, copies, resizing, and operators of accelerators only.

:data:`SPECIAL` maps names with overload to kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.attention
from torch._C import DispatchKey
from torch.backends.cuda import SDPAParams

from torchdevice.calls import interruptions
from torchdevice.calls.lacking.missing_operators import overload_of
from torchdevice.kernel import thread_state
from torchdevice.random_numbers import operators
from torchdevice.simulation import device_generators, policy, serving, storage_resizing
from torchdevice.simulation.allocator.storages import (
    fresh,
    has_no_values,
    index_meant,
    meant,
    set_storage,
)
from torchdevice.simulation.kernels import (
    cpu_kernels,
    cuda_values,
    derivatives,
    fused_attention,
    recurrent_networks,
)
from torchdevice.simulation.kernels.cpu_kernels import (
    aliased,
    count_copy,
    host_alias,
    index_of,
    of_formula,
)
from torchdevice.simulation.kernels.pipeline import Pipeline, none_of
from torchdevice.simulation.refusals import attention
from torchdevice.simulation.refusals.cuda_errors import ILLEGAL_ADDRESS
from torchdevice.torch_modules.apis import batch_norm, selective_checkpoints
from torchdevice.torch_modules.distributed import sharded_attention

SPECIAL: dict[str, Callable[..., Any]] = {}


_aten = torch.ops.aten


_CPU = torch.device("cpu")


# Torch's own functions behind ``torch.ops``: they take half of the time, because no Python frame
# chooses an overload.
_new_empty = _aten.empty.memory_format._op
_new_clone = _aten.clone.default._op
_new_copy = _aten._to_copy.default._op
_copy = _aten.copy_.default._op


def special(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a kernel for the named operators."""

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            SPECIAL[name] = kernel
        return kernel

    return register


# ---- allocation ----------------------------------------------------------------------------------


@special("empty.memory_format")
def _empty(
    size: Any, *, device: Any = None, pin_memory: Any = None, layout: Any = None, **options: Any
) -> Any:
    policy.check_scope()
    # `index_meant` in short, because every factory comes here.
    index = meant.index if device is None or device.index is None else device.index
    return fresh(_new_empty(size, device=_CPU, **options), index)


@special("empty_strided")
def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **options: Any
) -> Any:
    policy.check_scope()
    return fresh(_aten.empty_strided(size, stride, dtype=dtype, device=_CPU), index_meant(device))


@special("_efficientzerotensor")
def _efficient_zeros(size: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    policy.check_scope()
    return fresh(torch.zeros(size, dtype=dtype, device=_CPU), index_meant(device))


@special("clone")
def _clone(self: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    return fresh(_new_clone(aliased(self), memory_format=memory_format), index_of(self))


# ---- copies --------------------------------------------------------------------------------------


@special("_to_copy")
def _to_copy(
    self: torch.Tensor,
    *,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    **options: Any,
) -> torch.Tensor:
    if index_of(self) < 0:
        policy.check_scope()
    result = _new_copy(host_alias(self), device=_CPU, **options)
    if result.dtype in cuda_values.WIDE and index_of(self) >= 0:
        cuda_values.saturate(host_alias(self), result)
    if device is not None and device.type != policy.DEVICE_TYPE:
        destination = _pinned(result) if non_blocking else result
    else:
        destination = fresh(result, index_of(self) if device is None else index_meant(device))
    count_copy(self, destination, non_blocking)
    return destination


def _pinned(result: torch.Tensor) -> torch.Tensor:
    """Return a copy for which the host does not wait as page-locked memory, as on CUDA."""
    context = thread_state.state.context
    return result if context is None or context.program == "mps" else context.pinned.add(result)


@special("copy_")
def _copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    count_copy(source, self, non_blocking)
    _copy(host_alias(self), host_alias(source))
    if self.dtype in cuda_values.WIDE and index_of(source) >= 0:
        cuda_values.saturate(host_alias(source), host_alias(self))
    return self


# ---- sizes and storages --------------------------------------------------------------------------


@special("resize_")
def _resize_(self: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Resize a tensor, and its storage where that is too small. The storage keeps its contents."""
    shape = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    _aten.resize_.default(shape, size, memory_format=memory_format)
    if memory_format is None and shape.shape == self.shape:
        return self  # with its strides, as by every kernel of torch
    return cpu_kernels.take_shape(self, shape)


@special("set_.source_Storage_storage_offset")
def _set_from_storage(
    self: Any, source: Any, storage_offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    """Set a tensor's storage. One that is too small grows, as on CUDA; the CPU's does so itself."""
    if not stride:
        stride = torch.empty(size, device="meta").stride()
    if min((*size, *stride), default=0) >= 0:  # else torch's kernel has an error for it
        needed = cpu_kernels.end_of(
            torch.empty_strided(size, stride, dtype=self.dtype, device="meta"), storage_offset
        )
        if needed > source.nbytes() and source.device.type != "cpu":
            storage_resizing.resize(source, int(needed))
    return set_storage(self, source, storage_offset, size, stride)


@special("set_")
def _set_to_nothing(self: torch.Tensor) -> torch.Tensor:
    return set_storage(
        self,
        fresh(torch.empty(0, dtype=self.dtype), index_of(self)).untyped_storage(),
        0,
        (0,),
        (1,),
    )


# The CPU's kernels look at sizes and storages alone.
for _name in ("set_.source_Storage", "set_.source_Tensor", "is_set_to"):
    SPECIAL[_name] = cpu_kernels.view_of(overload_of(_name))


def _letting_go(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that drops the old storage in the mode: ``Tensor.set_`` calls no mode."""

    def run(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        context = thread_state.state.context
        if context is None:
            return kernel(self, *args, **kwargs)
        return interruptions.outliving(
            context, [interruptions.storage_of(self)], kernel, (self, *args), kwargs
        )

    return run


SPECIAL.update(
    {name: _letting_go(kernel) for name, kernel in SPECIAL.items() if name.startswith("set_")}
)


@special("record_stream")
def _record_stream(self: torch.Tensor, s: Any) -> None:
    """Do nothing: the observers of streams (``StreamUses``) know of the call already."""


# ---- operators that accelerators compute in another way than the CPU -----------------------------


@special("native_dropout")
def _native_dropout(
    input: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout as on a GPU, or in the CPU's arithmetic, equal to the CPU's to the bit by seed."""
    index, memory = index_of(input), aliased(input)
    drawing = device_generators.drawing_of(None, index)
    if drawing is not None:
        result, mask = operators.native_dropout(drawing, memory, p, train)
        return fresh(result, index), fresh(mask, index)
    if train is False or p == 0 or not memory.numel():
        return fresh(memory.clone(), index), fresh(torch.ones_like(memory, dtype=torch.bool), index)
    if p == 1:
        return fresh(torch.zeros_like(memory), index), fresh(
            torch.zeros_like(memory, dtype=torch.bool), index
        )
    noise = torch.empty_like(memory)
    noise.bernoulli_(
        1 - p, generator=device_generators.next_numbers(device_generators.default_generator(index))
    )
    mask = noise.bool()
    return fresh(memory * noise.div_(1 - p), index), fresh(mask, index)


@special("native_dropout_backward")
def _native_dropout_backward(
    grad_output: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    memory = aliased(grad_output)
    noise = aliased(mask).to(memory.dtype)
    return fresh(
        memory * (noise.div_(1 / scale) if scale else noise.zero_()), index_of(grad_output)
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` by the kernel that torch would choose on the CPU.

    For an out-of-tree device torch itself has a single choice. This kernel is registered above
    autograd, which differentiates the chosen kernel. Torch's own composite kernel runs in all other
    cases, and checks the arguments.
    """
    with torch._C.DisableTorchFunction():
        is_plain = attn_mask is None and not dropout_p and not enable_gqa
        if is_plain and sharded_attention.is_divided(query, key, value):
            return _FLASH_KERNEL(query, key, value, dropout_p, is_causal, scale=scale)[0]
        options = {"scale": scale, "enable_gqa": enable_gqa}
        is_checked = _is_checked(query)
        if is_checked:
            attention.check(
                SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            )
        tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        kernel, composes = None, is_checked
        if _are_differentiated(tensors):
            kernel = _differentiable_kernel(tensors, dropout_p, is_causal, enable_gqa)
            composes |= kernel is None
        if (
            not composes
            and _has_flash(tensors)
            and _chooses_flash(tensors, dropout_p, is_causal, **options)
        ):
            return _flash(tensors, kernel, dropout_p, is_causal, scale)
        refusing = tensors if kernel is None else derivatives.refusing(kernel, tensors)
        return _composed(refusing, dropout_p, is_causal, by_math=is_checked, **options)


def _is_checked(query: torch.Tensor) -> bool:
    """Return whether CUDA may refuse a call with this query. If not, its ``math`` computes it."""
    many = any(size > attention.MOST_ROWS for size in query.shape[:2])
    return (many or not torch._C._get_math_sdp_enabled()) and policy.stands_for_cuda()


def _are_differentiated(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether autograd may want the derivatives of a kernel for such tensors."""
    are_dense = all(_is_real(each) and not each.is_nested for each in tensors)
    return are_dense and derivatives.are_asked(tensors)


def _has_flash(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether the CPU has its flash kernel for such tensors; it has no mask gradient."""
    mask_learns = any(each.requires_grad for each in tensors[3:])
    are_alike = len({(each.device, each.layout, each.is_nested) for each in tensors}) == 1
    return (
        are_alike
        and not mask_learns
        and all(map(_is_real, tensors))
        and policy.provides(_FLASH_KERNEL)
    )


def _composed(
    tensors: Sequence[torch.Tensor],
    dropout_p: float,
    is_causal: bool,
    *,
    by_math: bool,
    **options: Any,
) -> torch.Tensor:
    """Call torch's composite kernel, or the kernel ``math`` alone."""
    query, key, value, *given = tensors
    mask = given[0] if given else None
    if by_math:
        added = _added(mask, query)
        result, *_ = _MATH_KERNEL(query, key, value, added, dropout_p, is_causal, **options)
        return result
    composed = _aten.scaled_dot_product_attention.default.decompose
    return composed(query, key, value, mask, dropout_p, is_causal, **options)


def _flash(
    tensors: Sequence[torch.Tensor],
    kernel: derivatives.Derivatives | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Return the CPU's flash results, with the derivatives of the device's kernel, if any."""
    if kernel is not None and derivatives.are_transformed():
        # Tangents may be of another transform, which asks a node.
        tensors, kernel = derivatives.refusing(kernel, tensors), None
    if kernel is not None:
        derivatives.refuse_tangents(kernel, tensors)
    # The kernel takes four dimensions.
    query, key, value, *rest = map(_of_four_dimensions, tensors)
    mask = _added(rest[0], query) if rest else None
    found: torch.Tensor
    found, *_ = _FLASH_KERNEL(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)
    if kernel is not None:
        derivatives.refuse_second(kernel, found)
    return found if tensors[0].dim() == 4 else found[0]


def _differentiable_kernel(
    tensors: Sequence[Any], dropout_p: float, is_causal: bool, enable_gqa: bool
) -> derivatives.Derivatives | None:
    """Return the derivatives of the real device's operator; None if it composes others."""
    if any(each.dim() < 2 for each in tensors[:3]):
        return None  # torch's composite kernel has the error
    if policy.stands_for_mps():
        watched = torch.is_grad_enabled() and any(each.requires_grad for each in tensors[:3])
        whole = not dropout_p and all(each.is_contiguous() for each in tensors[:3])
        return None if watched or not whole else derivatives.Derivatives(_ON_MPS, "")
    if not policy.stands_for_cuda():
        return None
    query, key, value, mask = (*tensors, None)[:4]
    if _CHOOSES_FOR_THREE:
        query, key, value, mask = map(_of_four_dimensions, (query, key, value, mask))
    call = _Call(query, key, value, mask, dropout_p, is_causal, enable_gqa)
    kernel = attention.operator_of(call)
    return None if kernel is None else derivatives.derivatives_of(kernel, f"{kernel}_backward")


def differentiated(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[bool, str]:
    """Return, for C++, if the device composes a call, and its error for second gradients."""
    with torch._C.DisableTorchFunction():
        given = query, key, value, *(() if attn_mask is None else (attn_mask,))
        kernel = _differentiable_kernel(given, dropout_p, is_causal, enable_gqa)
        if kernel is None:
            return True, ""
        return False, "" if kernel.second is None else kernel.second[1]


serving.answers["differentiated"] = differentiated

_CHOOSES_FOR_THREE = torch.__version__ >= "2.14"
"""Whether torch chooses a kernel for three dimensions too. It is asked once, because a comparison
parses the texts.
"""


def _of_four_dimensions(tensor: Any) -> Any:
    """Return a three-dimensional tensor as one batch, as torch 2.14 does to choose a kernel."""
    return tensor[None] if tensor is not None and tensor.dim() == 3 else tensor


class _Call(NamedTuple):
    """A call as ``SDPAParams`` describes it, which takes no wrappers of functorch."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool


_ON_MPS = "_scaled_dot_product_attention_math_for_mps"
"""The operator of MPS for dense inputs whose gradients nobody asks for
(transformers/attention.cpp).
"""


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return a mask as what is added to scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -math.inf)


def _chooses_flash(
    tensors: tuple[torch.Tensor, ...], dropout_p: float, is_causal: bool, **options: Any
) -> bool:
    """Return whether torch chooses the CPU's flash kernel for query, key, value and any mask."""
    if any(map(_is_wrapped, tensors)):
        given = map(_of_one_row, tensors)
    elif any(has_no_values(each.untyped_storage()) for each in tensors if index_of(each) >= 0):
        query, _, value = tensors[:3]
        return (
            not (dropout_p or options["enable_gqa"])
            and query.dim() == 4
            and query.shape[-1] == value.shape[-1]
        )
    else:
        given = map(_memory_of, tensors)
    chosen = _aten._fused_sdp_choice(*given, dropout_p=dropout_p, is_causal=is_causal, **options)
    return bool(chosen == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    return host_alias(tensor.detach())


def _of_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that the choice of a kernel takes for a functorch wrapper."""
    row = torch.empty(tensor.shape[-1:], dtype=tensor.dtype)
    return row.as_strided(tensor.shape, (*[0] * (tensor.dim() - 1), int(tensor.stride(-1) == 1)))


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _accepted(op: Any) -> Callable[..., Any]:
    """Return an operator's kernel, for calls that were not refused."""
    return Pipeline(op, refusals=none_of).run


_run_convolution = _accepted(_aten.convolution.default)


@special("convolution")
def _convolution_above(*args: Any) -> torch.Tensor:
    """TorchScript's tracer knows convolutions by the operator within."""
    if torch._C._get_tracing_state() is not None:
        return _aten._convolution.default(*args, False, False, True, True)
    return _run_convolution(*args)


@special("_convolution", "_convolution.deprecated")
def _convolution(*args: Any) -> torch.Tensor:
    """``_convolution``, called by traced programs: a convolution followed by settings of cuDNN."""
    return _run_convolution(*args[:9])


def convolve(*args: Any) -> torch.Tensor:
    """``_convolution`` above autograd, which differentiates ``convolution``."""
    with torch._C.DisableTorchFunction():
        return _aten.convolution(*args[:9])


def _ctc(overload: str) -> Callable[..., Any]:
    run = _accepted(getattr(_aten._ctc_loss, overload))

    def kernel(
        log_probs: torch.Tensor, targets: torch.Tensor, *lengths_and_options: Any, **options: Any
    ) -> Any:
        """Check the targets, which torch's kernels do not; the CPU's may end the process."""
        used = _used_targets(aliased(targets), lengths_and_options[1])
        classes = log_probs.size(-1)
        wrong = used[(used < 0) | (used >= classes)]
        if wrong.numel():
            why = f"Target {wrong[0].item()} of ctc_loss is not in [0, {classes})."
            raise policy.lose(why, ILLEGAL_ADDRESS) if policy.stands_for_cuda() else IndexError(why)
        return run(log_probs, targets, *lengths_and_options, **options)

    return kernel


def _used_targets(targets: torch.Tensor, lengths: Any) -> torch.Tensor:
    """Return the targets without those that only fill a row."""
    count = torch.as_tensor(host_alias(lengths) if isinstance(lengths, torch.Tensor) else lengths)
    if targets.dim() < 2:
        return targets[: max(0, int(count.sum()))]
    return targets[torch.arange(targets.shape[1]) < count.reshape(-1, 1)[: len(targets)]]


SPECIAL["_ctc_loss"], SPECIAL["_ctc_loss.Tensor"] = _ctc("default"), _ctc("Tensor")


def _is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory; the fake tensors of compilers have none."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and not torch._is_functional_tensor(tensor)


_MATH_KERNEL = _aten._scaled_dot_product_attention_math.default


_FLASH_KERNEL = _aten._scaled_dot_product_flash_attention_for_cpu.default


def _stood_for(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """Return the operator of CUDA for which the CPU's flash kernel stands, if any."""
    if not policy.stands_for_cuda():
        return _FLASH_KERNEL
    call = SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, False)
    kernel = attention.operator_of(call)
    return _FLASH_KERNEL if kernel is None else overload_of(kernel)


selective_checkpoints.STAND_INS[_FLASH_KERNEL] = _stood_for


# ---- linear algebra by cuSOLVER's names ----------------------------------------------------------


_run_svd, _run_lstsq = _accepted(_aten._linalg_svd.default), _accepted(_aten.linalg_lstsq.default)


@special("_linalg_svd")
def _svd(
    A: torch.Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> Any:
    """The CPU has one algorithm, and refuses the names of cuSOLVER's."""
    return _run_svd(A, full_matrices, compute_uv)


@special("linalg_lstsq")
def _lstsq(
    self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """CUDA's one driver, ``gels``: it assumes full rank, and returns a result for any matrix."""
    if not policy.stands_for_cuda():
        # Torch's own, which calls the operator with `out=`: MPS lacks that.
        return _aten.linalg_lstsq.default._op_dk(
            DispatchKey.CompositeExplicitAutograd, self, b, rcond, driver=driver
        )
    try:
        return _run_lstsq(self, b, rcond, driver="gels")
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return _by_triangles(self, b)


@of_formula
def _by_triangles(A: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, r = torch.linalg.qr(A)
    solution = torch.linalg.solve_triangular(r, q.mH @ b, upper=True)
    return solution, A.new_empty(0), torch.empty(0, dtype=torch.int64), A.new_empty(0)


@of_formula
def _factor_freely(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factor a matrix without pivoting, which only CUDA has a kernel for."""
    factors, steps = A.clone(), min(A.shape[-2:])
    for k in range(steps):
        factors[..., k + 1 :, k] /= factors[..., k, k, None]
        factors[..., k + 1 :, k + 1 :] -= (
            factors[..., k + 1 :, k, None] * factors[..., k, None, k + 1 :]
        )
    pivots = torch.arange(1, steps + 1, dtype=torch.int32).expand(*A.shape[:-2], steps).contiguous()
    return factors, pivots, torch.zeros(A.shape[:-2], dtype=torch.int32)


_factor_pivoting = _accepted(_aten.linalg_lu_factor_ex.default)


@special("linalg_lu_factor_ex")
def _lu_factor(A: torch.Tensor, *, pivot: bool = True, check_errors: bool = False) -> Any:
    return _factor_pivoting(A, check_errors=check_errors) if pivot else _factor_freely(A)


@special("linalg_lu")
def _lu(A: torch.Tensor, *, pivot: bool = True) -> Any:
    factors, pivots, _ = _lu_factor(A, pivot=pivot)
    return torch.lu_unpack(factors, pivots, unpack_pivots=pivot)


# ---- formulas, for what only accelerators have a kernel for --------------------------------------


def _sparse_product(
    compressed_A: torch.Tensor,
    dense_B: torch.Tensor,
    bias: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
    *algorithm: int,
) -> torch.Tensor:
    """A product of cuSPARSELt's, with a matrix that is kept whole here."""
    product = compressed_A.float() @ dense_B.float() * (1 if alpha is None else alpha)
    if bias is not None:
        product = product + bias[:, None].float()
    if transpose_result:
        product = product.t()
    return product.to(out_dtype or dense_B.dtype).contiguous()


# cuDNN's operators by torch's own. Their last arguments are settings of cuDNN.


def _affine_grid(theta: Any, *size: int) -> Any:
    return _aten.affine_grid_generator(theta, size, True)


def _affine_grid_backward(grad: Any, *size: int) -> Any:
    return _aten.affine_grid_generator_backward(grad, size, True)


def _convolution_of_cudnn(
    self: Any, weight: Any, padding: Any, stride: Any, dilation: Any, groups: int, *settings: bool
) -> Any:
    none = [0] * len(padding)
    return _aten.convolution(self, weight, None, stride, padding, dilation, False, none, groups)


def _transposed_convolution_of_cudnn(
    self: Any,
    weight: Any,
    padding: Any,
    output_padding: Any,
    stride: Any,
    dilation: Any,
    groups: int,
    *settings: bool,
) -> Any:
    return _aten.convolution(
        self, weight, None, stride, padding, dilation, True, output_padding, groups
    )


def _sampled_grid(self: Any, grid: Any) -> Any:
    return _aten.grid_sampler_2d(self, grid, 0, 0, True)


def _sampled_grid_backward(self: Any, grid: Any, gradient: Any) -> Any:
    return _aten.grid_sampler_2d_backward(gradient, self, grid, 0, 0, True, [True, True])


_FORMULAS: dict[str, Callable[..., Any]] = {
    "cudnn_affine_grid_generator": _affine_grid,
    "cudnn_affine_grid_generator_backward": _affine_grid_backward,
    "cudnn_convolution": _convolution_of_cudnn,
    "cudnn_convolution_transpose": _transposed_convolution_of_cudnn,
    "cudnn_grid_sampler": _sampled_grid,
    "cudnn_grid_sampler_backward": _sampled_grid_backward,
    **recurrent_networks.FORMULAS,
    **batch_norm.KERNELS,
    "_cslt_compress": torch.Tensor.clone,
    "_cslt_sparse_mm": _sparse_product,
}


SPECIAL.update(
    fused_attention.KERNELS, **{name: of_formula(each) for name, each in _FORMULAS.items()}
)
