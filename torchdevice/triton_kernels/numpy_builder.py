"""A kernel's operations on NumPy arrays: those of Triton's interpreter, with a GPU's values.

The interpreter keeps bfloat16 and float8 as integers of their bits, and computes with these
integers. Here they are decoded to float32 and rounded again to nearest, as torch and the GPU do.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchdevice.kernel.lowlevel import memory_windows
from torchdevice.kernel.thread_state import refuse
from torchdevice.simulation.refusals.cuda_errors import DEVICE_ASSERT, cuda_error
from torchdevice.triton_kernels import libdevice
from torchdevice.triton_kernels.memory_checks import Memory
from torchdevice.triton_kernels.outer_sums import OuterSum, added, terms_of
from torchdevice.triton_kernels.triton_internals import (
    InterpreterBuilder,
    TensorHandle,
    ir,
    numpy_dtype,
    tl,
)

SMALL_FLOATS = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
"""Floating dtypes that NumPy lacks, and torch's. Triton alone has float8e4b15, which stays the
interpreter's.
"""

_BITS = {1: torch.uint8, 2: torch.uint16}


def decoded(handle: Any) -> Any:
    """Return the values of a handle, as float32 where NumPy lacks the dtype."""
    values = handle.data
    # Pointers, which have no hash, are wider.
    if values.itemsize > 2 or values.dtype.kind not in "iu":
        return values
    dtype = SMALL_FLOATS.get(handle.dtype.scalar)
    if dtype is None:
        return values
    bits = torch.from_numpy(np.ascontiguousarray(values))
    return bits.view(dtype).float().numpy()


def encoded(values: Any, dtype: Any) -> Any:
    """Return a handle of values rounded to nearest in a dtype; float8 saturates, as on CUDA."""
    dtype = dtype.scalar
    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    small = SMALL_FLOATS.get(dtype)
    if small is None:
        return TensorHandle(values.astype(numpy_dtype(dtype), copy=False), dtype)
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if small.itemsize == 1:
        limit = torch.finfo(small).max
        wide = wide.clamp(-limit, limit)
    return TensorHandle(wide.to(small).view(_BITS[small.itemsize]).numpy(), dtype)


_OF_BITS = np.bitwise_and, np.bitwise_or, np.bitwise_xor


def _as_tf32(values: Any) -> Any:
    """Round float32 to TF32's 10 bits of mantissa, ties away from zero, as ``cvt.rna`` does."""
    bits = values.view(np.uint32) + np.uint32(0x1000)
    bits &= np.uint32(0xFFFFE000)
    rounded = bits.view(np.float32)
    finite = np.isfinite(values)
    return rounded if finite.all() else np.where(finite, rounded, values)


def _of_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a builder's operation: a function of operands' values, in the first one's dtype."""

    def operation(self: Any, arg: Any, *rest: Any) -> Any:
        values = (each.data if isinstance(each, TensorHandle) else each for each in rest)
        return TensorHandle(function(arg.data, *values), arg.dtype.scalar)

    return operation


class NumpyBuilder(InterpreterBuilder):  # type: ignore[misc]
    """Computes on NumPy arrays what Triton's semantic asks a builder of MLIR for.

    Args:
        memory: The memory of the launch.
        options: The backend's options of the launch.

    Attributes:
        group: The instances that run together, as rows of their three numbers. The first axis of
            every array is that of the instances, and has the length 1 where all of them have the
            same value.
        printed: The lines that the group prints when it has ended.
    """

    def __init__(self, memory: Memory, options: Any):
        super().__init__()
        self.group = np.zeros((1, 3), np.int32)
        self.memory = memory
        self.options = options
        self.printed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("create_", "get_")):
            return functools.partial(_refuse, name.partition("_")[2])
        raise AttributeError(name)

    # ---- instances -------------------------------------------------------------------------------

    def create_get_program_id(self, axis: int) -> Any:
        return TensorHandle(self.group[:, axis], tl.int32)

    def one(self, handle: Any) -> Any:
        """Return the value of a scalar that Python needs: of a condition, or of a loop's bound.

        Raises:
            DivergedError: The instances of the group have several values.
        """
        values = handle.data.reshape(-1)
        if len(values) > 1 and (values != values[0]).any():
            raise DivergedError(values)
        return values[0].item()

    # ---- memory ----------------------------------------------------------------------------------

    def _at(self, pointers: Any, mask: Any, access: str) -> Any:
        size = numpy_dtype(pointers.get_element_ty()).itemsize
        active = True if mask is None else mask.data
        active, at = np.broadcast_arrays(active, pointers.data)
        return self.memory.addresses(at, active, size, access, self.group)

    def create_load(self, ptr: Any, *rest: Any) -> Any:
        return self.create_masked_load(ptr, None, None)

    def create_store(self, ptr: Any, value: Any, *rest: Any) -> None:
        self.create_masked_store(ptr, value, None)

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *rest: Any, **options: Any
    ) -> Any:
        dtype = ptrs.get_element_ty()
        kind = np.dtype(numpy_dtype(dtype))
        default = np.zeros((), kind) if other is None else other.data
        if rows := self.memory.rows(ptrs, mask, kind):
            return TensorHandle(rows.read(default), dtype)
        at, active = self._at(ptrs, mask, "reads")
        at, active, default = np.broadcast_arrays(at, active, default)
        return TensorHandle(memory_windows.read(at, active, default, kind), dtype)

    def create_masked_store(
        self, ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any
    ) -> None:
        if rows := self.memory.rows(ptrs, mask, value.data.dtype):
            rows.write(value.data, self.memory)
            return
        at, active = self._at(ptrs, mask, "writes")
        at, active, values = np.broadcast_arrays(at, active, value.data)
        self.memory.log(at, active, values.dtype)
        memory_windows.write(at, active, values)

    def _for_each(self, ptr: Any, mask: Any, *values: Any) -> list[Any]:
        """Return an atomic's addresses, lanes and operands for each instance, even if equal."""
        at, active = self._at(ptr, mask, "updates")
        shape = np.broadcast_shapes(
            (len(self.group), *at.shape[1:]), *(each.data.shape for each in values)
        )
        made = []
        for each in (TensorHandle(at, ptr.dtype), TensorHandle(active, tl.int1), *values):
            whole = np.ascontiguousarray(np.broadcast_to(each.data, shape))
            made.append(TensorHandle(whole, each.dtype))
        addresses, lanes, *_, last = (each.data for each in made)
        self.memory.log(addresses, lanes, last.dtype)
        return made

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        at, _, expected, new = self._for_each(ptr, None, cmp, val)
        return super().create_atomic_cas(at, expected, new, *rest)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        at, active, values = self._for_each(ptr, mask, val)
        if val.dtype.scalar not in (*SMALL_FLOATS, tl.float16):
            return super().create_atomic_rmw(op, at, values, active, *rest)
        return self._update_one_by_one(op, at.data, active.data, values.data, val.dtype)

    def _update_one_by_one(self, op: Any, at: Any, active: Any, values: Any, dtype: Any) -> Any:
        """Do an atomic on floats, whose bits Triton's interpreter adds. Addresses may be equal."""
        by_op = {ir.ATOMIC_OP.MIN: self.create_minnumf, ir.ATOMIC_OP.MAX: self.create_maxnumf}
        combine = by_op.get(op, self.create_fadd)
        old = np.zeros(values.size, values.dtype)
        yes = np.array([True])
        addresses, operands = at.ravel(), values.ravel()
        for lane in np.flatnonzero(active):
            one = slice(lane, lane + 1)
            where, given = addresses[one], operands[one]
            old[one] = memory_windows.read(where, yes, given, given.dtype)
            new = combine(TensorHandle(old[one], dtype), TensorHandle(given, dtype))
            memory_windows.write(where, yes, new.data)
        return TensorHandle(old.reshape(values.shape), dtype.scalar)

    # ---- descriptors and block pointers ----------------------------------------------------------

    def create_make_block_ptr(
        self, base: Any, shape: Any, strides: Any, offsets: Any, block: Any, order: Any
    ) -> Any:
        return _Tile(base, shape, strides, block, offsets=[each.data for each in offsets])

    def create_advance(self, ptr: Any, offsets: Any) -> Any:
        return dataclasses.replace(
            ptr, offsets=[a + b.data for a, b in zip(ptr.offsets, offsets, strict=True)]
        )

    def create_tensor_pointer_load(
        self, ptr: Any, boundary_check: Any, padding: Any, *rest: Any
    ) -> Any:
        return self._load_tile(ptr.pointers(ptr.offsets, boundary_check), padding)

    def create_tensor_pointer_store(
        self, ptr: Any, value: Any, boundary_check: Any, *rest: Any
    ) -> None:
        self.create_masked_store(*ptr.pointers(ptr.offsets, boundary_check, value))

    def create_make_tensor_descriptor(
        self, base: Any, shape: Any, strides: Any, block: Any, is_signed: Any, padding: Any = None
    ) -> Any:
        size = base.dtype.element_ty.primitive_bitwidth // 8
        in_bytes = [stride.data * size for stride in strides[:-1]]
        if any((each % 16).any() for each in (base.data, *in_bytes)):
            raise ValueError(
                "a tensor descriptor needs a base and strides that are multiples of 16 bytes."
            )
        return _Tile(base, shape, strides, block, padding=padding)

    def create_descriptor_load(self, desc: Any, indices: Any, *rest: Any) -> Any:
        return self._load_tile(desc.at(indices), desc.padding)

    def create_descriptor_store(self, desc: Any, value: Any, indices: Any) -> None:
        self.create_masked_store(*desc.at(indices, value))

    def create_descriptor_gather(self, desc: Any, x_offsets: Any, y_offset: Any, *rest: Any) -> Any:
        return self._load_tile(desc.at([x_offsets, y_offset]), desc.padding)

    def create_descriptor_scatter(
        self, desc: Any, value: Any, x_offsets: Any, y_offset: Any
    ) -> None:
        self.create_masked_store(*desc.at([x_offsets, y_offset], value))

    def create_descriptor_reduce(self, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        name, dtype = kind.name, value.dtype.scalar
        if dtype.is_floating():
            name = name.replace("ADD", "FADD")
        elif dtype.is_int_unsigned():
            name = name.replace("M", "UM")
        how = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        self.create_atomic_rmw(getattr(ir.ATOMIC_OP, name), *desc.at(indices, value), *how)

    def _load_tile(self, place: tuple[Any, Any, Any], padding: Any) -> Any:
        pointers, _, mask = place
        value = float("nan") if padding == ir.PADDING_OPTION.PAD_NAN else 0
        dtype = pointers.get_element_ty()
        return self.create_masked_load(pointers, mask, encoded(np.array(value, np.float64), dtype))

    # ---- arithmetic ------------------------------------------------------------------------------

    def unary_op(self, arg: Any, op: Any) -> Any:
        return encoded(op(decoded(arg)), arg.dtype)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        one, other = decoded(lhs), decoded(rhs)
        if one.dtype == other.dtype == np.bool_ and op not in _OF_BITS:
            # NumPy saturates where Triton wraps: int1 is an integer of one bit.
            wrapped = op(one.astype(np.int8), other.astype(np.int8)) & 1
            return TensorHandle(wrapped.astype(np.bool_), tl.int1)
        return encoded(op(one, other), lhs.dtype)

    def create_add(self, lhs: Any, rhs: Any) -> Any:
        if not lhs.dtype.scalar.is_int() or lhs.dtype.scalar == tl.int1:
            return self.binary_op(lhs, rhs, np.add)
        return added(lhs, rhs, terms_of(rhs))

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        terms = terms_of(offset)
        # A sum of offsets that is beyond their dtype has wrapped before it is added.
        if len(terms) > 1 and not _fits(terms):
            terms = [offset.data]
        size = np.uint64(numpy_dtype(ptr.get_element_ty()).itemsize)
        return added(ptr, offset, (each.astype(np.uint64) * size for each in terms))

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        return encoded(op(decoded(lhs), decoded(rhs), decoded(other)), other.dtype)

    create_minnumf = functools.partialmethod(binary_op, op=np.fmin)
    create_maxnumf = functools.partialmethod(binary_op, op=np.fmax)
    create_erf = functools.partialmethod(
        unary_op, op=functools.partial(libdevice.by_torch, torch.erf)
    )

    def create_clampf(self, arg: Any, low: Any, high: Any, propagate_nans: Any) -> Any:
        if propagate_nans == ir.PROPAGATE_NAN.ALL:
            return self.ternary_op(arg, low, high, np.clip)
        return self.create_minnumf(self.create_maxnumf(arg, low), high)

    def create_select(self, cond: Any, lhs: Any, rhs: Any) -> Any:
        chosen = np.where(cond.data, lhs.data, rhs.data)
        return TensorHandle(chosen.astype(numpy_dtype(rhs.dtype), copy=False), rhs.dtype.scalar)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        # The product of two float32 is exact in float64: only the sum is rounded, at most twice.
        wide = [decoded(each).astype(np.float64) for each in (x, y, z)]
        return encoded(wide[0] * wide[1] + wide[2], z.dtype)

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, args: Any, dtype: Any, *_: Any
    ) -> Any:
        return encoded(libdevice.function(symbol)(*map(decoded, args)), dtype)

    def create_inline_asm(self, *args: Any) -> Any:
        _refuse("inline_asm_elementwise")

    def create_print(self, prefix: str, hex: bool, values: Any, is_signed: Any) -> None:
        for number, (x, y, z) in enumerate(self.group.tolist()):
            pid = f"pid ({x}, {y}, {z})"
            if not values:
                self.printed.append(f"{pid}{prefix}")
            for operand, value in enumerate(values):
                which = f"(operand {operand}) " if len(values) > 1 else ""
                as_bits = hex or value.dtype.is_ptr()
                data = decoded(value)[number % len(value.data)]
                for at, element in np.ndenumerate(data):
                    index = _index(at, data.shape)
                    self.printed.append(
                        f"{pid} idx ({index}){prefix}{which}{_shown(element, as_bits)}"
                    )

    def show_printed(self) -> None:
        """Print the group's output."""
        for line in self.printed:
            print(line)
        self.printed.clear()

    def create_assert(self, condition: Any, message: str, *rest: Any) -> None:
        if not np.all(condition.data if isinstance(condition, TensorHandle) else condition):
            raise cuda_error(DEVICE_ASSERT, f"tl.device_assert failed: {message}")

    # ---- casts -----------------------------------------------------------------------------------

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        values = decoded(src)
        if dst_type.scalar == tl.int1:
            return TensorHandle(values != 0, tl.int1)
        if values.dtype == np.bool_:
            values = values.astype(np.uint8)
        return encoded(values, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if tl.float8e4b15 in (src.dtype.scalar, dst_type.scalar):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        made = self.cast_impl(src, dst_type)
        if rounding_mode != ir.ROUNDING_MODE.RTZ:
            return made
        # Where rounding to nearest went away from zero, the bits of the number before, which are
        # less by one.
        away = np.abs(decoded(made)) > np.abs(decoded(src))
        bits = made.data.view(f"u{made.data.itemsize}")
        bits = (bits - away).astype(bits.dtype)
        return TensorHandle(bits.view(made.data.dtype), made.dtype)

    def get_bf16(self, value: float) -> Any:
        return encoded(np.array([value], dtype=np.float32), tl.bfloat16)

    def create_bitcast(self, src: Any, dst_type: Any) -> Any:
        return TensorHandle(
            np.ascontiguousarray(src.data).view(numpy_dtype(dst_type)), dst_type.scalar
        )

    # ---- shapes: the first axis is that of the instances -----------------------------------------

    def create_make_range(self, ret_ty: Any, start: int, stop: int) -> Any:
        return TensorHandle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        data = arg.data.reshape(arg.data.shape[0], *(1,) * len(ret_ty.shape))
        return TensorHandle(np.broadcast_to(data, (len(data), *ret_ty.shape)), arg.dtype.scalar)

    create_unsplat = _of_values(lambda data: data.reshape(len(data), -1)[:, 0])
    create_broadcast = _of_values(lambda data, shape: np.broadcast_to(data, (len(data), *shape)))
    create_reshape = _of_values(lambda data, shape, allow_reorder: data.reshape(len(data), *shape))
    create_expand_dims = _of_values(lambda data, axis: np.expand_dims(data, axis + 1))
    create_trans = _of_values(
        lambda data, perm: np.transpose(data, (0, *(axis + 1 for axis in perm)))
    )
    create_cat = _of_values(lambda *both: np.concatenate(np.broadcast_arrays(*both), axis=1))
    create_join = _of_values(lambda *both: np.stack(np.broadcast_arrays(*both), axis=-1))

    @_of_values
    def create_gather(data: Any, at: Any, axis: int) -> Any:
        count = max(len(data), len(at))
        data = np.broadcast_to(data, (count, *data.shape[1:]))
        at = np.broadcast_to(at, (count, *at.shape[1:]))
        return np.take_along_axis(data, at, axis=axis + 1)

    def create_histogram(self, data: Any, bins: int, mask: Any) -> Any:
        active = True if mask is None else mask.data
        values, active = np.broadcast_arrays(data.data, active)
        counted = active & (values >= 0) & (values < bins)
        # Each instance has bins of its own.
        at = np.arange(len(values))[:, None] * bins + values
        found = np.bincount(at[counted], minlength=len(values) * bins)
        return TensorHandle(found.reshape(-1, bins).astype(np.int32), tl.int32)

    def create_dot(
        self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        operands = a.data[0].nbytes + b.data[0].nbytes
        self.memory.launch.check_shared(self.options.num_stages * operands)
        one, other = decoded(a), decoded(b)
        if one.dtype == np.float32 == other.dtype and input_precision == ir.INPUT_PRECISION.TF32:
            one, other = _as_tf32(one), _as_tf32(other)
        # Sums of products of int8 are exact in float64, and float16 is summed in float32.
        wide = np.float64 if one.dtype.kind in "iu" or one.dtype == np.float64 else np.float32
        product = np.matmul(one.astype(wide, copy=False), other.astype(wide, copy=False))
        return encoded(product + decoded(d), d.dtype)

    def create_dot_scaled(self, *given: Any) -> Any:
        a, a_scale, a_format, b, b_scale, b_format, _, a_packed_by_k, b_packed_by_k, d = given
        one = _scaled(decoded(a), a_scale, a_format, -1 if a_packed_by_k else -2)
        other = _scaled(
            np.swapaxes(decoded(b), -1, -2), b_scale, b_format, -1 if b_packed_by_k else -2
        )
        product = np.matmul(one, np.swapaxes(other, -1, -2))
        return encoded(product + decoded(d), d.dtype)


def _fits(terms: Any) -> bool:
    """Return whether the sum of integers is within their dtype."""
    limits = np.iinfo(terms[0].dtype)
    least = sum(int(each.min()) for each in terms)
    most = sum(int(each.max()) for each in terms)
    return limits.min <= least <= most <= limits.max


def _index(at: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return the place of an element, whose numbers are as wide as the largest of their axis."""
    widths = (len(str(size - 1)) for size in shape)
    return ", ".join(f"{number:{width}}" for number, width in zip(at, widths, strict=True))


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _scaled(values: Any, scale: Any, kind: Any, packed: int) -> Any:
    """Return an operand of ``tl.dot_scaled``, whose last axis is summed over."""
    if kind == ir.ScaleDotElemTypeTY.E2M1:
        pairs = np.stack([values & 15, values >> 4], axis=values.ndim if packed == -1 else -2)
        shape = list(values.shape)
        shape[packed] *= 2
        values = _E2M1[pairs.reshape(shape)]
    values = values.astype(np.float32)
    if scale is None:
        return values
    # An exponent alone, or a number in float8.
    if scale.dtype.is_floating():
        factors = decoded(scale)
    else:
        factors = np.ldexp(np.float32(1), scale.data.astype(np.int32) - 127)
    times = values.shape[-1] // factors.shape[-1]
    return values * np.repeat(factors, times, axis=-1)


class DivergedError(Exception):
    """The instances of a group take different ways.

    Attributes:
        values: For each instance, the value that it decides by.
    """

    def __init__(self, values: Any):
        super().__init__()
        self.values = values


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tensor descriptor, or a block pointer, which has offsets of its own."""

    base: Any
    shape: Any
    strides: Any
    block: Any
    offsets: Any = None
    padding: Any = None

    def at(self, indices: Any, value: Any = None) -> tuple[Any, Any, Any]:
        """Return :meth:`pointers` for indices that may all be outside of the tensor."""
        return self.pointers([each.data for each in indices], range(len(indices)), value)

    def pointers(self, offsets: Any, checked: Any, value: Any = None) -> tuple[Any, Any, Any]:
        """Return a block's pointers, value and mask, in the order of a store's arguments.

        Args:
            offsets: For each axis the first index of each instance, or all indices of the axis.
            checked: The axes whose indices may be outside of the tensor.
            value: The values to store.
        """
        dtype = self.base.dtype
        size = numpy_dtype(dtype.element_ty).itemsize
        terms = [self._for_block(self.base)]
        mask = np.ones((1, *self.block), bool)
        for axis, offset in enumerate(offsets):
            at = self._indices(axis, offset)
            step = self._for_block(self.strides[axis])
            terms.append((size * at * step).astype(np.uint64))
            if axis in checked:
                mask = mask & (at >= 0) & (at < self._for_block(self.shape[axis]))
        shape = np.broadcast_shapes(mask.shape, *(each.shape for each in terms))
        return OuterSum(terms, shape, dtype), value, TensorHandle(mask, tl.int1)

    def _for_block(self, scalar: Any) -> Any:
        """Return the scalars of the instances, with an axis for each of the block."""
        return scalar.data.reshape(-1, *(1,) * len(self.block))

    def _indices(self, axis: int, offset: Any) -> Any:
        """Return the indices of an axis, of which the first is given for each instance, or all."""
        if offset.ndim > 1:
            indices = offset.astype(np.int64)
        else:
            indices = offset[:, None] + np.arange(self.block[axis])
        lengths = (-1 if each == axis else 1 for each in range(len(self.block)))
        return indices.reshape(len(indices), *lengths)


def _shown(element: Any, hex: bool) -> str:
    """Return an element as the printf of CUDA shows it."""
    if hex:
        return f"0x{int(element.view(f'u{element.itemsize}')):0{2 * element.itemsize}x}"
    return f"{element:f}" if element.dtype.kind == "f" else str(int(element))


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    refuse(
        f"tl.{name}",
        "Triton's interpreter runs the kernel, and has no such operation. Run the kernel on a GPU.",
    )
