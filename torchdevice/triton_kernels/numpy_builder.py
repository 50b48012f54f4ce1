"""The operations of a kernel on NumPy arrays: those of Triton's interpreter, corrected where a GPU's values differ.

The interpreter keeps bfloat16 and float8 as integers of their bits, and computes with these integers. Here they are
decoded to float32 and rounded again to nearest, as torch and the GPU do.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from torchdevice.core.thread_state import refuse
from torchdevice.simulation.refusals.cuda_errors import DEVICE_ASSERT, cuda_error
from torchdevice.triton_kernels import libdevice
from torchdevice.triton_kernels.memory import Memory
from torchdevice.triton_kernels.triton_internals import (
    InterpreterBuilder,
    TensorHandle,
    ir,
    memory_access,
    numpy_dtype,
    tl,
)

_SMALL_FLOATS = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
"""Floating dtypes that NumPy lacks, and torch's. Triton alone has float8e4b15, which stays the interpreter's."""

_BITS: dict[int, Any] = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16)}


def decoded(handle: Any) -> Any:
    """Return the values of a handle, as float32 where NumPy lacks the dtype."""
    dtype = _SMALL_FLOATS.get(handle.dtype.scalar)
    if dtype is None or handle.data.dtype.kind not in "iu":
        return handle.data
    bits, _ = _BITS[dtype.itemsize]
    as_torch = torch.from_numpy(np.ascontiguousarray(handle.data).view(str(bits).removeprefix("torch.")))
    return as_torch.view(dtype).float().numpy()


def encoded(values: Any, dtype: Any) -> Any:
    """Return a handle of values in a dtype, rounded to nearest; float8 saturates, as CUDA's conversions do."""
    dtype = dtype.scalar
    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    small = _SMALL_FLOATS.get(dtype)
    if small is None:
        return TensorHandle(values.astype(numpy_dtype(dtype), copy=False), dtype)
    bits, as_numpy = _BITS[small.itemsize]
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if small.itemsize == 1:
        limit = torch.finfo(small).max
        wide = wide.clamp(-limit, limit)
    return TensorHandle(wide.to(small).view(bits).numpy().view(as_numpy), dtype)


def _as_tf32(values: Any) -> Any:
    """Round float32 to the 10 bits of TF32's mantissa, to nearest and ties away from zero, as ``cvt.rna`` does."""
    rounded = (values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


class NumpyBuilder(InterpreterBuilder):  # type: ignore[misc]
    """Computes on NumPy arrays what Triton's semantic asks a builder of MLIR for.

    Args:
        memory: The memory of the launch.
        options: The backend's options of the launch.
        functions: The backend's functions by name, of which the smallest shapes of ``tl.dot`` are used.
    """

    def __init__(self, memory: Memory, options: Any, functions: dict[str, Any]):
        super().__init__()
        self.memory = memory
        self.options = options
        self.codegen_fns["min_dot_size"] = functions["min_dot_size"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("create_", "get_")):
            return functools.partial(_refuse, name.partition("_")[2])
        raise AttributeError(name)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _at(self, pointers: Any, mask: Any, access: str) -> Any:
        size = numpy_dtype(pointers.get_element_ty()).itemsize
        return TensorHandle(self.memory.addresses(pointers.data, mask.data, size, access), pointers.dtype)

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
        return super().create_masked_load(self._at(ptrs, mask, "reads"), mask, other, *rest, **options)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return super().create_masked_store(self._at(ptrs, mask, "writes"), value, mask, *rest)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        everywhere = TensorHandle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        return super().create_atomic_cas(self._at(ptr, everywhere, "updates"), cmp, val, *rest)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        at = self._at(ptr, mask, "updates")
        if val.dtype.scalar not in (*_SMALL_FLOATS, tl.float16):
            return super().create_atomic_rmw(op, at, val, mask, *rest)
        # Triton's interpreter adds the bits. One element after the other, since addresses may be equal.
        old = np.zeros_like(val.data)
        flat = [np.broadcast_to(each, val.data.shape).ravel() for each in (at.data, val.data, mask.data)]
        for index, (address, value, active) in enumerate(zip(*flat, strict=True)):
            if active:
                one, yes, value = np.array([address]), np.array([True]), np.array([value])
                found = memory_access.load(one, yes, value, value.dtype)
                added = self.create_fadd(TensorHandle(found, val.dtype), TensorHandle(value, val.dtype))
                memory_access.store(one, added.data, yes)
                old.ravel()[index] = found[0]
        return TensorHandle(old, val.dtype.scalar)

    # ---- arithmetic --------------------------------------------------------------------------------------------------

    def unary_op(self, arg: Any, op: Any) -> Any:
        return encoded(op(decoded(arg)), arg.dtype)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        one, other = decoded(lhs), decoded(rhs)
        if one.dtype == other.dtype == np.bool_:
            # NumPy saturates what Triton wraps: int1 is an integer of one bit.
            return TensorHandle((op(one.astype(np.int8), other.astype(np.int8)) & 1).astype(np.bool_), tl.int1)
        return encoded(op(one, other), lhs.dtype)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        return encoded(op(decoded(lhs), decoded(rhs), decoded(other)), other.dtype)

    def create_select(self, cond: Any, lhs: Any, rhs: Any) -> Any:
        chosen = np.where(cond.data, lhs.data, rhs.data)
        return TensorHandle(chosen.astype(numpy_dtype(rhs.dtype), copy=False), rhs.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        # The product of two float32 is exact in float64, so that only the sum is rounded, twice at worst.
        wide = [decoded(each).astype(np.float64) for each in (x, y, z)]
        return encoded(wide[0] * wide[1] + wide[2], z.dtype)

    def create_erf(self, arg: Any) -> Any:
        return self.unary_op(arg, functools.partial(libdevice.by_torch, torch.erf))

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, args: Any, result_type: Any, *rest: Any
    ) -> Any:
        return encoded(libdevice.function(symbol)(*map(decoded, args)), result_type)

    def create_inline_asm(self, *args: Any) -> Any:
        _refuse("inline_asm_elementwise")

    def create_assert(self, condition: Any, message: str, *rest: Any) -> None:
        if not np.all(condition.data if isinstance(condition, TensorHandle) else condition):
            raise cuda_error(DEVICE_ASSERT, f"tl.device_assert failed: {message}")

    # ---- casts -------------------------------------------------------------------------------------------------------

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        values = decoded(src)
        if dst_type.scalar == tl.int1:
            return TensorHandle(values != 0, tl.int1)
        return encoded(values if values.dtype != np.bool_ else values.astype(np.uint8), dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        odd = {src.dtype.scalar, dst_type.scalar} & {tl.float8e4b15}
        if odd or rounding_mode == ir.ROUNDING_MODE.RTZ:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def get_bf16(self, value: float) -> Any:
        return encoded(np.array([value], dtype=np.float32), tl.bfloat16)

    def create_bitcast(self, src: Any, dst_type: Any) -> Any:
        return TensorHandle(np.ascontiguousarray(src.data).view(numpy_dtype(dst_type)), dst_type.scalar)

    # ---- products ----------------------------------------------------------------------------------------------------

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        one, other = decoded(a), decoded(b)
        if one.dtype == np.float32 == other.dtype and input_precision == ir.INPUT_PRECISION.TF32:
            one, other = _as_tf32(one), _as_tf32(other)
        # Sums of products of int8 are exact in float64, and float16 is summed in float32.
        wide = np.float64 if one.dtype.kind in "iu" or one.dtype == np.float64 else np.float32
        return encoded(np.matmul(one.astype(wide), other.astype(wide)) + decoded(d), d.dtype)


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    refuse(f"tl.{name}", "Triton's interpreter runs the kernel, and has no such operation. Run the kernel on a GPU.")
