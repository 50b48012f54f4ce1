"""Tensors of the device that are not strided, or made of parts: sparse, nested, quantized.

- Sparse ones (COO, CSR, CSC, BSR, BSC) are torch's own, whose indices and values are on the device.
  Operators that only take or return indices and values run on the tensor itself; the others on a
  sparse CPU tensor that shares the memory.
- Nested ones with the strided layout are torch's own, whose values are one buffer on the device.
  Views, and copies between devices, run torch's kernel for the CPU on the tensor itself: it calls
  operators on the buffer. The others run on a nested CPU tensor that shares the memory. The jagged
  layout needs nothing: it is a subclass in Python.
- Each way to a quantized one is refused: torch makes them for devices whose allocator is in C++
  only, DLPack does not know them, and torch announces that it will drop them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._C import DispatchKey

from torchdevice.calls.lacking.missing_operators import of_aten, overload_of, shadowed
from torchdevice.errors import NotSupportedError
from torchdevice.kernel import registered_kernels
from torchdevice.kernel.devices.sparse_parts import parts_of
from torchdevice.kernel.lowlevel.dlpack_alias import on_cpu
from torchdevice.kernel.stand_ins import with_bits, written
from torchdevice.kernel.torch_internals import data_ptr, registrations_for_dispatch_key
from torchdevice.simulation import policy
from torchdevice.simulation.allocator.storages import index_meant, meaning, owner_of
from torchdevice.simulation.kernels import cpu_kernels
from torchdevice.simulation.kernels.cpu_kernels import (
    CpuAliases,
    Kernel,
    aliased,
    index_of,
    sparse_of,
    without_mode,
)
from torchdevice.simulation.kernels.pipeline import Pipeline, fallback, none_of
from torchdevice.simulation.profiles import cpu_only_sparse_operators, missing_on_cuda
from torchdevice.simulation.refusals.cuda_rules import OF_SPARSE
from torchdevice.simulation.refusals.refusal_rules import Refusals, Rule, checks, name_of

_aten = torch.ops.aten


_OF_PARTS = (
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_coo_tensor_with_dims",
    "_indices",
    "_values",
    "indices",
    "values",
    "_nnz",
    "sparse_dim",
    "dense_dim",
    "_dimI",
    "_dimV",
    "is_coalesced",
    "_coalesced_",
    "sparse_resize_",
    "sparse_resize_and_clear_",
)
"""Operators that make sparse tensors from indices and values, or return these, and read no memory.
"""


_OF_COMPRESSED_PARTS = (
    "crow_indices",
    "col_indices",
    "ccol_indices",
    "row_indices",
    "values",
    "_nnz",
    "sparse_dim",
    "dense_dim",
)
"""The functions for the compressed layouts. Torch itself makes such tensors for any device."""


_RUN_WHOLE = {"clone", "copy_", "zero_", "empty_like"}


_COMPOSED = {"is_pinned"}
"""Operators that torch's composite kernels do on the parts of a compressed tensor, whatever device
these are on.
"""


def _put(name: str, kernel: Any, key: str) -> None:
    registered_kernels.put(f"aten::{name}", kernel, key, __file__)


def register_sparse() -> None:
    """Register the kernels with torch."""
    _register_layout("SparsePrivateUse1", DispatchKey.SparseCPU, _OF_PARTS, set())
    _register_layout(
        "SparseCsrPrivateUse1", DispatchKey.SparseCsrCPU, _OF_COMPRESSED_PARTS, _COMPOSED
    )


def _register_layout(key: str, of_cpu: Any, of_parts: Sequence[str], composed: set[str]) -> None:
    """Register the kernels for a dispatch key, for which the CPU has ``of_cpu``."""
    registered_kernels.put_fallback(fallback(_kernel), key, __file__)
    _put("_to_copy", Pipeline(_aten._to_copy.default, _copy_parts, none_of).run, key)
    for name in of_parts:
        _put(name, cpu_kernels.without_mode(_of_parts(getattr(_aten, name).default, of_cpu)), key)
    for name in sorted(
        (shadowed(of_cpu.name) | _RUN_WHOLE).difference(of_parts, composed, {"_to_copy"})
    ):
        _put(name, _kernel(name), key)


def _of_parts(op: Any, key: Any) -> Callable[..., Any]:
    run = functools.partial(op._op_dk, key)
    if not any(argument.name == "device" for argument in op._schema.arguments):
        return run

    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        with meaning(index_meant(device)):
            return run(*args, device=device, **kwargs)

    return make


def _kernel(op: Any) -> Kernel:
    """Return a kernel that runs an operator on CPU tensors."""
    return Pipeline(op, _SparseAliases, _refusals_of).run


def _refusals_of(op: Any) -> Refusals:
    def missing(*args: Any, **kwargs: Any) -> str:
        return missing_on_cuda(op.name(), "SparseCsrCUDA")

    lacks = op.name().removeprefix("aten::") in cpu_only_sparse_operators()
    if lacks:
        own = [Rule(name_of(op), missing, "native_functions.yaml", NotImplementedError)]
    else:
        own = []
    return checks(own + OF_SPARSE.get(name_of(op), []))


def _copy_parts(
    self: torch.Tensor,
    *,
    dtype: Any = None,
    device: Any = None,
    non_blocking: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Copy a sparse tensor by its indices and values, as torch does on CUDA."""
    *indices, values = parts_of(self)
    where = {"device": device, "non_blocking": non_blocking}
    copied = [
        *(_aten._to_copy(part, **where) for part in indices),
        _aten._to_copy(values, dtype=dtype, **where),
    ]
    if not self.is_sparse and index_of(copied[-1]) >= 0 and policy.stands_for_mps():
        raise NotImplementedError(missing_on_cuda("aten::empty.memory_format", "SparseCsrMPS"))
    with meaning(max(0, index_of(copied[-1]))):
        return sparse_of(copied, self)


class _SparseAliases(cpu_kernels.CpuAliases):
    """CPU tensors in a call's memory, plain or sparse; written sparse ones get new parts."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            return aliased(tensor)
        if not tensor.is_sparse:
            return sparse_of([_own(part) for part in parts_of(tensor)], tensor)
        # By the CPU's kernels themselves, which is quicker than through the dispatcher.
        parts = (_own(_of_coo(each, tensor)) for each in (_aten._indices, _aten._values))
        coalesced = _of_coo(_aten.is_coalesced, tensor)
        return _aten._sparse_coo_tensor_unsafe(*parts, tensor.shape, is_coalesced=coalesced)

    def run(self, args: Any, kwargs: Any) -> Any:
        try:
            return super().run(args, kwargs)
        except RuntimeError as error:  # such as a product in half precision, which CUDA has
            return cpu_kernels.again(error, self._op, self.func, list(args), kwargs)

    def settle(self) -> None:
        for target in written(self._op, self.args, self.kwargs):
            own = self.pairs[id(target)][1]
            if target.is_sparse:
                _of_coo(
                    _aten.copy_sparse_to_sparse_, target, cpu_kernels.fresh_sparse(own, self.index)
                )
                _of_coo(_aten._coalesced_, target, own.is_coalesced())
            elif target.layout is not torch.strided:
                _replace_compressed(target, own)


def _of_coo(packet: Any, *args: Any) -> Any:
    return packet.default._op_dk(DispatchKey.SparseCPU, *args)


_resize_as = functools.partial(_aten.resize_as_sparse_.default._op_dk, DispatchKey.SparseCsrCPU)


def _replace_compressed(target: torch.Tensor, own: torch.Tensor) -> None:
    """Write back a compressed layout, unless ``own`` still has the memory of ``target``."""
    pairs = list(zip(parts_of(target), parts_of(own), strict=True))
    if all(data_ptr(old) == data_ptr(new) and old.shape == new.shape for old, new in pairs):
        return
    _resize_as(target, own)
    for old, new in zip(parts_of(target), parts_of(own), strict=True):
        old.copy_(new)


def _own(part: torch.Tensor) -> torch.Tensor:
    """Return an unshared CPU tensor in a sparse part's memory, which no operator can resize."""
    # A result with the memory of the part shares the storage of the part.
    owner_of(part.untyped_storage())
    return with_bits(on_cpu(part), part)


# ---- nested --------------------------------------------------------------------------------------


_ON_ITSELF = frozenset(
    {
        "_nested_tensor_size",
        "_nested_tensor_strides",
        "_nested_tensor_storage_offsets",
        "is_pinned",
        "is_same_size",
        "alias",
        "detach",
        "values",
        "view",
        "unbind.int",
        "select.int",
        "narrow",
        "chunk",
        "split_with_sizes",
        "transpose.int",
        "squeeze",
        "squeeze.dim",
        "squeeze.dims",
        "unsqueeze",
        "_to_copy",
        "copy_",
        "clone",
        "empty_like",
    }
)
"""Operators whose kernel for the CPU reads no memory, or calls another operator that does."""

_MAKING_NESTED = (
    "_nested_from_padded",
    "_nested_tensor_from_mask",
    "_nested_tensor_from_mask_left_aligned",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
)
"""Operators on plain tensors that give nested ones, or call such operators."""


def register_nested() -> None:
    """Register the kernels with torch."""
    for name in sorted(of_aten(registrations_for_dispatch_key("NestedTensorCPU"))):
        kernel = Pipeline(name, _NestedAliases, none_of).run
        if name in _ON_ITSELF:
            kernel = without_mode(
                functools.partial(overload_of(name)._op_dk, DispatchKey.NestedTensorCPU)
            )
        _put(name, kernel, "NestedTensorPrivateUse1")
    for name in _MAKING_NESTED:
        _put(name, Pipeline(name, _NestedAliases, none_of).run, "PrivateUse1")


class _NestedAliases(CpuAliases):
    """CPU tensors in the memory of a call's tensors, nested or not."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return _of_buffer(aliased(_buffer(tensor)), tensor) if tensor.is_nested else aliased(tensor)

    def back(self, result: torch.Tensor) -> torch.Tensor:
        if result.is_nested:
            return _of_buffer(super().back(_buffer(result)), result)
        return super().back(result)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a nested tensor as a plain tensor of one dimension."""
    if not tensor.size(0):
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return tensor[0].as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _of_buffer(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor of a buffer, with the sizes, strides and offsets of another."""
    parts = (
        like._nested_tensor_size(),
        like._nested_tensor_strides(),
        like._nested_tensor_storage_offsets(),
    )
    return torch.ops.aten._nested_view_from_buffer(buffer, *parts)


# ---- quantized -----------------------------------------------------------------------------------


_MAKING_QUANTIZED = (
    "quantize_per_tensor",
    "quantize_per_tensor.tensor_qparams",
    "quantize_per_tensor.tensors",
    "quantize_per_tensor_dynamic",
    "quantize_per_channel",
    "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
    "empty_quantized",
)
"""The operators that make quantized tensors."""


def register_quantized() -> None:
    """Register the refusals with torch."""
    # Not a fallback, which takes long to register: the other operators are given quantized tensors,
    # and there are none.
    for name in (*_MAKING_QUANTIZED, "copy_", "empty.memory_format", "empty_strided"):
        base, _, overload = name.partition(".")
        if hasattr(getattr(torch.ops.aten, base, None), overload or "default"):
            for key in (
                "QuantizedPrivateUse1",
                *(["PrivateUse1"] if name in _MAKING_QUANTIZED else []),
            ):
                _put(name, _refuse_quantized, key)


def _refuse_quantized(*args: Any, **kwargs: Any) -> NoReturn:
    remedy = "Quantize on the CPU, or use fake quantization or a library with tensor subclasses."
    raise NotSupportedError("A quantized tensor", remedy)


MAKING = (*_MAKING_NESTED, *_MAKING_QUANTIZED)
"""The operators that make nested or quantized tensors of plain ones."""
