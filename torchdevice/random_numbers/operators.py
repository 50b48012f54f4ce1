"""The operators of torch that draw numbers, as its CUDA kernels compute them, on CPU tensors.

Each function names the file of torch that its launch and arithmetic follow. Files without a folder
are those of ``aten/src/ATen/native/cuda``; all of them are public. :data:`OPERATORS` has the
functions by the operators' names.

Not here are ``poisson``, ``binomial``, ``_standard_gamma``, ``_sample_dirichlet``, ``rrelu``,
fractional pooling, the dropout of fused attention and of recurrent networks, and the seeds of
Inductor's code: how these use up numbers depends on the GPU's compiler or on closed libraries, or
is not worked out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch

from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.random_numbers import elementary, philox, scratch
from torchdevice.random_numbers.philox import Gpu, Kind, Source

_aten = torch.ops.aten

_LARGEST_INT = 2**31 - 1
"""A kernel whose tensor has larger offsets in bytes runs for a half at a time
(``with_32bit_indexing``).
"""

_DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
"""``std::numeric_limits<T>::digits``"""

_LEAST, _MOST = -(2**63), 2**63 - 1

_FLOAT64 = numpy.dtype(numpy.float64)


class Drawing:
    """Draws the numbers of a GPU.

    Args:
        gpu: The figures of the GPU.
        take: Moves the generator's offset on by so much, and returns where it was.
    """

    def __init__(self, gpu: Gpu, take: Callable[[int], Source]):
        self.gpu, self._take = gpu, take

    def take(self, increment: int) -> Source:
        """Advance the generator by a multiple of 4 (``CUDAGeneratorImpl::philox_cuda_state``)."""
        return self._take(-(-increment // 4) * 4)

    def numbers(self, kind: Kind, like: torch.Tensor) -> Any:
        """Return an array with a number per element, by ``distribution_nullary_kernel``.

        DistributionTemplates.h
        """
        out = numpy.empty(like.numel(), kind.dtype)
        self.fill(kind, out, like.itemsize)
        return out

    def fill(self, kind: Kind, out: Any, itemsize: int) -> None:
        """Write a number per element of a tensor, of so many bytes each, into an array."""
        source = self.take(self.gpu.offsets_for(len(out), kind.unroll))
        if _is_one_part(len(out), itemsize):
            return philox.fill(kind, out, source, self.gpu.threads_for(len(out)))
        # The call for the whole tensor has moved the offset before it divides the work.
        for start, count in _parts(0, len(out), itemsize):
            source = self.take(self.gpu.offsets_for(count, kind.unroll))
            philox.fill(kind, out[start : start + count], source, self.gpu.threads_for(count))


def _is_one_part(count: int, itemsize: int) -> bool:
    return (count - 1) * itemsize + 1 <= _LARGEST_INT


def _parts(start: int, count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    if _is_one_part(count, itemsize):
        yield start, count
    else:
        half = count // 2
        yield from _parts(start, half, itemsize)
        yield from _parts(start + half, count - half, itemsize)


# ---- tensors -------------------------------------------------------------------------------------


def _check(op: Any, tensor: torch.Tensor, *args: Any) -> None:
    """Raise torch's error for wrong arguments, or for a tensor whose elements share memory."""
    overlaps = not tensor.is_contiguous() and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    op(tensor if overlaps else torch.empty(0, dtype=tensor.dtype), *args)


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with dimensions in a kernel's order of elements: by falling strides."""
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda each: -strides[each]))


def _write(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write values, one for each element in a kernel's order, and return the tensor."""
    own = _in_order(tensor)
    own.copy_(values.view(own.shape))
    return tensor


def _filled(draw: Drawing, kind: Kind, tensor: torch.Tensor) -> bool:
    """Fill a tensor's own memory. Return False for another dtype than the kind's, and for gaps."""
    own = _in_order(tensor)
    if _IN_NUMPY.get(tensor.dtype) is not kind.dtype or not own.is_contiguous():
        return False
    draw.fill(kind, own.view(-1).numpy(), tensor.itemsize)
    return True


def _scaled_in_place(
    draw: Drawing,
    kind: Kind,
    tensor: torch.Tensor,
    factor: float,
    summand: float,
    end: float = math.nan,
) -> bool:
    """Fill the memory of a tensor with ``x * factor + summand``, where ``end`` becomes the summand.
    Return false for one of another dtype than the kind's, or with gaps.
    """
    if not _filled(draw, kind, tensor):
        return False
    own, count = _in_order(tensor), tensor.numel()
    for scale in philox.scaling if tensor.dtype is torch.float32 else ():
        if scale(data_ptr(own), count, factor, summand, end, summand):
            return True
    if tensor.dtype is torch.float32:
        _scale_by_numpy(own.view(-1).numpy(), factor, summand)
    else:
        _scaled(own, factor, summand)
    if not math.isnan(end):
        _turn(own, end, summand)
    return True


def _turn(tensor: torch.Tensor, end: float, start: float) -> None:
    """Turn the largest value that numbers may have to another one."""
    # One in millions of float32, and to look for it takes a tenth of the time.
    if float(tensor.max()) == end:
        tensor.masked_fill_(tensor == end, start)


def _scale_by_numpy(values: Any, factor: float, summand: float) -> None:
    """:func:`_scaled` for memory in float32."""
    # Numbers beyond the range become infinite, as torch's.
    with scratch.borrowed() as room, numpy.errstate(all="ignore"):
        for start in range(0, len(values), scratch.CHUNK):
            room.used, part = 0, values[start : start + scratch.CHUNK]
            wide = room.array(len(part), _FLOAT64)
            numpy.copyto(wide, part)
            wide *= factor
            wide += summand
            numpy.copyto(part, wide, casting="unsafe")


def _is_double(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float64


def _computes_in(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if _is_double(tensor) else torch.float32


def _rounded(value: float, dtype: torch.dtype) -> float:
    if dtype in _IN_NUMPY:
        return float(_IN_NUMPY[dtype](value))
    if dtype is torch.float16:  # by way of float32, as torch
        return float(numpy.float16(numpy.float32(value)))
    return float(torch.tensor(value, dtype=dtype))


_IN_NUMPY: dict[torch.dtype, Any] = {torch.float32: numpy.float32, torch.float64: numpy.float64}
"""Dtypes to which NumPy rounds as well, in less time."""


def _scaled(x: torch.Tensor, factor: float, summand: float) -> torch.Tensor:
    """Return ``x * factor + summand``, which a GPU rounds once."""
    if factor == 1 and summand == 0:
        return x
    if x.dtype is torch.float64:
        return x.mul_(factor).add_(summand)
    return x.double().mul_(factor).add_(summand).to(x.dtype)


def _logarithm(x: torch.Tensor) -> torch.Tensor:
    values = x.numpy()
    if _is_double(x):
        return torch.from_numpy(numpy.log(values))
    found = numpy.empty_like(values)
    with scratch.borrowed() as room:
        for start in range(0, len(values), scratch.CHUNK):
            part = slice(start, start + scratch.CHUNK)
            room.used = 0
            found[part] = elementary.logarithm(values[part], room)
    return torch.from_numpy(found)


def _uniform_kind(tensor: torch.Tensor) -> Kind:
    return philox.UNIFORM64 if _is_double(tensor) else philox.UNIFORM


def _normal_kind(tensor: torch.Tensor) -> Kind:
    return philox.NORMAL64 if _is_double(tensor) else philox.NORMAL


def _uniform_numbers(draw: Drawing, tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers in (0, 1] in the dtype a kernel computes in (``uniform_and_transform``)."""
    return torch.from_numpy(draw.numbers(_uniform_kind(tensor), tensor))


def _normal_numbers(draw: Drawing, tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(draw.numbers(_normal_kind(tensor), tensor))


# ---- distributions of one kernel: DistributionTemplates.h, and ATen/core/TransformationHelper.h --


def uniform_(
    draw: Drawing, self: torch.Tensor, low: float = 0.0, high: float = 1.0
) -> torch.Tensor:
    """``uniform_kernel``. It moves the closed end of its interval from the upper to the lower."""
    _check(_aten.uniform_.default, self, low, high)
    if not self.numel():
        return self
    if self.is_complex():
        uniform_(draw, torch.view_as_real(self), low, high)
        return self
    if low == 0 and high == 1 and _filled(draw, philox.UNIT, self):
        return self
    start, end = _rounded(low, self.dtype), _rounded(high, self.dtype)
    span = _rounded(end - start, self.dtype)
    if _scaled_in_place(draw, _uniform_kind(self), self, span, start, end):
        return self
    values = _scaled(_uniform_numbers(draw, self), span, start).to(self.dtype)
    _turn(values, end, start)
    return _write(self, values)


def normal_(draw: Drawing, self: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """``normal_kernel``"""
    _check(_aten.normal_.default, self, mean, std)
    if not self.numel():
        return self
    if self.is_complex():
        normal_(draw, torch.view_as_real(self), mean, std / math.sqrt(2))
        return self
    if mean == 0 and std == 1 and _filled(draw, _normal_kind(self), self):
        return self
    kept = _computes_in(self)
    factor, summand = _rounded(std, kept), _rounded(mean, kept)
    if _scaled_in_place(draw, _normal_kind(self), self, factor, summand):
        return self
    return _write(self, _scaled(_normal_numbers(draw, self), factor, summand))


def log_normal_(
    draw: Drawing, self: torch.Tensor, mean: float = 1.0, std: float = 2.0
) -> torch.Tensor:
    """``log_normal_kernel``"""
    _check(_aten.log_normal_.default, self, mean, std)
    if not self.numel():
        return self
    kept = _computes_in(self)
    normal = _scaled(_normal_numbers(draw, self), _rounded(std, kept), _rounded(mean, kept))
    return _write(self, normal.double().exp_())


def exponential_(draw: Drawing, self: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    """``exponential_kernel``. The logarithm of what is nearly 1 counts as half an epsilon."""
    _check(_aten.exponential_.default, self, lambd)
    if not self.numel():
        return self
    kept = _computes_in(self)
    numbers, half = _uniform_numbers(draw, self), torch.finfo(kept).eps / 2
    found = _logarithm(numbers).masked_fill_(numbers >= 1 - half, -half)
    return _write(self, found.mul_(_rounded(-1 / _rounded(lambd, kept), kept)))


def cauchy_(
    draw: Drawing, self: torch.Tensor, median: float = 0.0, sigma: float = 1.0
) -> torch.Tensor:
    """``cauchy_kernel``"""
    _check(_aten.cauchy_.default, self, median, sigma)
    if not self.numel():
        return self
    kept = _computes_in(self)
    numbers = _uniform_numbers(draw, self)
    if not _is_double(self):
        epsilon = torch.finfo(kept).eps
        numbers.clamp_(epsilon, 1 - epsilon)
    angle = numbers.sub_(0.5).mul_(_rounded(math.pi, kept))
    tangent = angle.double().tan_().to(kept)
    return _write(self, _scaled(tangent, _rounded(sigma, kept), _rounded(median, kept)))


def geometric_(draw: Drawing, self: torch.Tensor, p: float) -> torch.Tensor:
    """``geometric_kernel``"""
    _check(_aten.geometric_.default, self, p)
    if not self.numel():
        return self
    if _is_double(self):
        divisor = math.log1p(-p)
    else:
        rest = torch.ones(1, dtype=torch.float32) - _rounded(p, torch.float32)
        divisor = float(_logarithm(rest))
    return _write(self, _logarithm(_uniform_numbers(draw, self)).div_(divisor).ceil_())


def bernoulli_(draw: Drawing, self: torch.Tensor, p: float = 0.5) -> torch.Tensor:
    """``bernoulli_kernel``"""
    _check(_aten.bernoulli_.float, self, p)
    if not self.numel():
        return self
    return _write(self, _uniform_numbers(draw, self) < _rounded(p, _computes_in(self)))


# ---- integers ------------------------------------------------------------------------------------


def random_(draw: Drawing, self: torch.Tensor) -> torch.Tensor:
    """``random_kernel``"""
    _check(_aten.random_.default, self)
    if not self.numel():
        return self
    kind = philox.PAIRS if self.dtype in (torch.float64, torch.int64) else philox.WORDS
    return _write(self, _integers(draw.numbers(kind, self), _values_of(self.dtype), 0))


def _values_of(dtype: torch.dtype) -> int:
    """Return how many values from 0 a dtype has, for floating point those without gaps."""
    if dtype is torch.bool:
        return 2
    return 2 ** _DIGITS[dtype] + 1 if dtype in _DIGITS else torch.iinfo(dtype).max + 1


def _integers(words: Any, span: int, base: int) -> torch.Tensor:
    """Return ``words % span + base`` as int64, which wraps around."""
    _reduce(words, span)
    found = torch.from_numpy(words.astype(numpy.uint64, copy=False).view(numpy.int64))
    return found.add_(base) if base else found


def _reduce(words: Any, span: int) -> None:
    """Replace words by their remainders by a span."""
    if span >= 1 << words.itemsize * 8:
        return
    if span & (span - 1) == 0:
        words &= words.dtype.type(span - 1)
        return
    # NumPy divides by one number faster than it takes a remainder.
    quotients = words // words.dtype.type(span)
    quotients *= words.dtype.type(span)
    words -= quotients


def random_from(draw: Drawing, self: torch.Tensor, low: int, high: int | None) -> torch.Tensor:
    """``random_from_to_kernel``, and ``random_full_64_bits_range_kernel`` for all of int64.

    The range is that of ATen/native/DistributionTemplates.h.
    """
    _check(getattr(_aten.random_, "from"), self, low, high)
    if not self.numel():
        return self
    if high is None and low == _LEAST:
        return _write(self, _integers(draw.numbers(philox.PAIRS, self), 2**64, 0))
    if high is None:
        last = 2 ** _DIGITS[self.dtype] if self.dtype in _DIGITS else _values_of(self.dtype) - 1
        low = _fitting(low, self.dtype)
        span = last - low + 1
    else:
        span = _fitting_end(high, self.dtype) - _fitting(low, self.dtype)
        low = _fitting(low, self.dtype)
    # "allow approx 5% skew in uniform int generation using %"
    kind = philox.PAIRS if span >= 1 << 28 else philox.WORDS
    return _write(self, _integers(draw.numbers(kind, self), span, low))


def random_to(draw: Drawing, self: torch.Tensor, high: int) -> torch.Tensor:
    """``random_from_to_kernel``"""
    return random_from(draw, self, 0, high)


def _fitting(low: int, dtype: torch.dtype) -> int:
    """Return a lower end that the dtype has, at or above ``low`` (``update_from``)."""
    if dtype not in _DIGITS:
        return low
    nearest = int(_rounded(low + 1, dtype))
    if nearest >= low:
        return low
    return nearest + (1 << (abs(low + 1).bit_length() - _DIGITS[dtype]))


def _fitting_end(high: int, dtype: torch.dtype) -> int:
    """Return an upper end whose predecessor the dtype has, at or below ``high`` (``update_to``)."""
    if dtype not in _DIGITS:
        return high
    nearest = int(_rounded(high - 1, dtype))
    if nearest < high:
        return high
    return nearest - (1 << (abs(high - 1).bit_length() - _DIGITS[dtype]))


def randperm_out(draw: Drawing, n: int, *, out: torch.Tensor) -> torch.Tensor:
    """``randperm_out_cuda``: the order of random keys, whose rare equal ones are then shuffled.

    Randperm.cu, Randperm.cuh
    """
    if n < 0 or n > 2 ** _DIGITS.get(out.dtype, 63) + 1:
        _aten.randperm.generator_out(n, generator=None, out=out)  # raises
    if out.numel() != n:
        out.resize_(n)
    if n == 0:
        return out
    bits = min(64, math.ceil(math.log2(n - (6 * float(n) * n + 1) / (math.log(0.9) * 12))))
    dtype = torch.int32 if bits <= 32 else torch.int64
    # The integers of the dtype but the last. The sort compares their last bits as numbers without a
    # sign, or all of them, whose order is that of the remainders.
    keys = draw.numbers(philox.PAIRS, torch.empty(n, dtype=dtype))
    _reduce(keys, 2 ** torch.iinfo(dtype).bits - 1)
    keys &= numpy.uint64(2**bits - 1)
    places = _order(keys, bits)
    source = draw.take(n)
    _shuffle_equal(keys[places], places, source)
    return out.copy_(torch.from_numpy(places))


_DIGIT = 16
"""The bits of a digit. NumPy counts numbers of so many bits, and compares longer ones."""


def _order(keys: Any, bits: int) -> Any:
    """Return the places of keys without a sign in their order, of equal keys the first first."""
    places = keys.astype(numpy.uint16).argsort(kind="stable")
    for shift in range(_DIGIT, bits, _DIGIT):
        digits = (keys >> numpy.uint64(shift)).astype(numpy.uint16)
        places = places[digits[places].argsort(kind="stable")]
    return places


def _shuffle_equal(keys: Any, places: Any, source: Source) -> None:
    """Shuffle the places of equal keys, each run by the thread of its first key."""
    equal = keys[1:] == keys[:-1]
    starts = numpy.flatnonzero(equal)
    for start in starts.tolist():
        if start and equal[start - 1]:
            continue
        length = 2
        while start + length < len(keys) and equal[start + length - 1]:
            length += 1
        for step, last in enumerate(range(length - 1, 0, -1)):
            other = philox.words_of(source, step // 4, start)[step % 4] % (last + 1)
            one, two = start + last, start + other
            places[one], places[two] = places[two], places[one]


def randperm(
    draw: Drawing, n: int, *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    """``randperm`` of ATen/native/TensorFactories.cpp"""
    return randperm_out(draw, n, out=torch.empty(0, dtype=dtype or torch.int64))


# ---- of tensors ----------------------------------------------------------------------------------


def bernoulli_tensor_(draw: Drawing, self: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """``bernoulli_tensor_cuda_kernel``: a thread draws four numbers for four adjacent elements.

    DistributionTemplates.h, and ``kernelPointwiseApply2`` of ATen/cuda/CUDAApplyUtils.cuh
    """
    _check(_aten.bernoulli_.Tensor, self, torch.empty(0, dtype=p.dtype))
    if not self.numel():
        draw.take(10)
        return self
    chances = p.to(_computes_in(self)).expand(self.shape)
    least, most = chances.aminmax()
    if not (float(least) >= 0 and float(most) <= 1):  # neither holds for NaN
        _aten.bernoulli_.Tensor(self, p)  # raises
    source = draw.take(10)
    own, numbers = self, philox.uniform_of_threads(source, -(-self.numel() // 4)).reshape(-1)
    if not (self.is_contiguous() and chances.is_contiguous()):
        order = _common_order(self, chances)
        own, chances = self.permute(order), chances.permute(order)
    drawn = torch.from_numpy(numbers[: self.numel()]).view_as(own)
    # Into the tensor itself, unless `p` shares its memory, which the comparison reads.
    if own.untyped_storage().data_ptr() == chances.untyped_storage().data_ptr():
        own.copy_(drawn <= chances)
    else:
        torch.le(drawn, chances, out=own)
    return self


def _common_order(*given: torch.Tensor) -> list[int]:
    """Return ``rearrangeDims``' order of dimensions: falling strides, as far as tensors allow."""
    order = list(range(given[0].dim()))
    for i in range(len(order) - 1):
        if given[0].shape[order[i]] == 1:
            continue
        for j in range(i + 1, len(order)):
            if given[0].shape[order[j]] == 1:
                continue
            pairs = [(each.stride(order[i]), each.stride(order[j])) for each in given]
            some_rise = any(one < other for one, other in pairs)
            if some_rise and not any(one > other for one, other in pairs):
                order[i], order[j] = order[j], order[i]
    return order


def bernoulli(draw: Drawing, self: torch.Tensor) -> torch.Tensor:
    """``bernoulli`` of ATen/native/Distributions.cpp"""
    return bernoulli_tensor_(draw, torch.empty_like(self), self)


def bernoulli_out(draw: Drawing, self: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """``bernoulli_out`` of ATen/native/Distributions.cpp"""
    if out.shape != self.shape:
        out.resize_(self.shape)
    return bernoulli_tensor_(draw, out, self)


def bernoulli_p(draw: Drawing, self: torch.Tensor, p: float) -> torch.Tensor:
    """``bernoulli`` of ATen/native/Distributions.cpp"""
    return bernoulli_(draw, torch.empty_like(self), p)


def normal_of(
    draw: Drawing, mean: Any, std: Any = 1.0, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``normal_out_impl`` of ATen/native/DistributionTemplates.h"""
    given = [each for each in (mean, std) if isinstance(each, torch.Tensor)]
    if _has_negative(std):
        _aten.normal(mean, std)  # raises
    shape = torch.broadcast_shapes(*(each.shape for each in given))
    if out is None:
        out = torch.empty(shape, dtype=given[0].dtype)
    else:
        _aten._resize_output_(out, shape, out.device)
    if not isinstance(std, torch.Tensor):
        return normal_(draw, out, 0.0, std).add_(mean)
    return normal_(draw, out).mul_(std).add_(mean)


def _has_negative(std: Any) -> bool:
    if not isinstance(std, torch.Tensor):
        return bool(std < 0)
    return std.is_complex() or bool((std < 0).any())


def multinomial(
    draw: Drawing, self: torch.Tensor, num_samples: int, replacement: bool = False
) -> torch.Tensor:
    """``multinomial`` of ATen/native/Distributions.cpp, or MultinomialKernel.cu (replacement).

    There the sums of probabilities are rounded as one sum in float64, which is not the order of a
    GPU's additions. A number that falls between the two roundings, one of a million or so, gives
    the neighbour of a GPU's sample.
    """
    if not _can_sample(self, num_samples, replacement):
        # It raises, or there is nothing to draw.
        return _aten.multinomial(self, num_samples, replacement)  # type: ignore[no-any-return]
    if replacement and num_samples > 1:
        rows = self.reshape(-1, self.shape[-1])
        return _with_replacement(draw, rows, num_samples).view(*self.shape[:-1], num_samples)
    chances = self / exponential_(draw, torch.empty_like(self))
    if num_samples == 1:
        return chances.argmax(-1, keepdim=True)
    return chances.topk(num_samples).indices


def _can_sample(chances: torch.Tensor, samples: int, replacement: bool) -> bool:
    if (
        chances.dim() not in (1, 2)
        or not chances.is_floating_point()
        or not chances.numel()
        or samples <= 0
    ):
        return False
    if not replacement and samples > chances.shape[-1]:
        return False
    are_chances = ((chances >= 0) & chances.isfinite()).all()
    return bool(are_chances & (chances.sum(-1) > 0).all())


_SAMPLING_BLOCK, _LARGEST_GRID = 128, 65535
"""The threads of a block of ``sampleMultinomialWithReplacement``, and the largest second side of a
grid.
"""


def _with_replacement(draw: Drawing, rows: torch.Tensor, samples: int) -> torch.Tensor:
    grid_rows = min(len(rows), _LARGEST_GRID)
    source = draw.take(((len(rows) - 1) // grid_rows + 1) * 4)
    width = -(-samples // _SAMPLING_BLOCK) * _SAMPLING_BLOCK
    weights = rows.double()
    chances = (weights / weights.sum(-1, keepdim=True)).to(rows.dtype)
    are_possible = bool((chances != 0).all())
    sums = chances.double().cumsum(-1).to(rows.dtype)
    found = []
    for first in range(0, len(rows), grid_rows):
        count = min(grid_rows, len(rows) - first)
        of_turn = Source(source.seed, source.offset + first // grid_rows * 4)
        # The first of each thread's numbers.
        drawn = numpy.empty(width * count, numpy.float32)
        philox.fill(philox.UNIFORM, drawn, of_turn, len(drawn))
        numbers = torch.from_numpy(drawn).view(count, width)[:, :samples]
        part = slice(first, first + count)
        chosen = torch.searchsorted(sums[part], numbers.to(rows.dtype).contiguous())
        chosen.clamp_(max=rows.shape[1] - 1)
        if not are_possible:
            chosen = _last_possible(chances[part]).gather(-1, chosen)
        found.append(chosen)
    return found[0] if len(found) == 1 else torch.cat(found)


def _last_possible(chances: torch.Tensor) -> torch.Tensor:
    """Return for each place the last one at or before it with a chance."""
    places = torch.arange(chances.shape[-1]).expand(chances.shape)
    return places.where(chances != 0, 0).cummax(-1).values


def multinomial_out(
    draw: Drawing,
    self: torch.Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """See :func:`multinomial`."""
    shape = (*self.shape[:-1], num_samples)
    # Before it draws, since a call whose `out` cannot grow is made again.
    if _can_sample(self, num_samples, replacement) and out.shape != shape:
        out.resize_(shape)
    return out.copy_(multinomial(draw, self, num_samples, replacement))


def native_dropout(
    draw: Drawing, input: torch.Tensor, p: float, train: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``native_dropout_cuda``: a thread drops the adjacent elements that it reads at once.

    Dropout.cu
    """
    if train is False or not input.numel():
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(input), torch.zeros_like(input, dtype=torch.bool)
    kept = _computes_in(input)
    chance = _rounded(1.0 - p, kept)
    width = _read_at_once(input)
    # One that reads a single element counts as the other kernels do.
    if width > 1:
        numbers = _drawn_by_readers(draw, input, width)
    else:
        numbers = draw.numbers(philox.UNIFORM, input)
    mask = torch.empty_like(input, dtype=torch.bool)
    order = _in_order(input)
    ordered = torch.from_numpy(numbers).view(order.shape).to(kept) < chance
    _in_order(mask).copy_(ordered)
    result = torch.empty_like(input)
    values = order.to(kept).mul(ordered.to(kept)).mul_(_rounded(1.0 / chance, kept))
    _in_order(result).copy_(values)
    return result, mask


def _read_at_once(input: torch.Tensor) -> int:
    """Return a thread's elements per read (``get_vector_size``); memory begins 256-aligned."""
    if not _in_order(input).is_contiguous():
        return 1
    width = 16 // input.itemsize
    start = input.storage_offset() * input.itemsize
    while width > 1 and (start % (width * input.itemsize) or input.numel() % width):
        width //= 2
    return width


def _drawn_by_readers(draw: Drawing, input: torch.Tensor, width: int) -> Any:
    """Return the numbers of ``fused_dropout_kernel_vec``, in the order of memory."""
    count, threads = input.numel(), draw.gpu.threads_for(input.numel())
    source = draw.take(draw.gpu.offsets_for(count, 4))
    calls = max(1, width // 4)
    out = numpy.empty(-(-count // (threads * width)) * threads * width, numpy.float32)
    turns = out.reshape(-1, threads, width)
    for turn, numbers in enumerate(turns):
        readers = min(threads, -(-(count - turn * threads * width) // width))
        for call in range(calls):
            of_call = Source(source.seed, source.offset + (turn * calls + call) * 4)
            drawn = philox.uniform_of_threads(of_call, readers)
            numbers[:readers, call * 4 : call * 4 + 4] = drawn[:, :width]
    return out[:count]


OPERATORS: dict[str, Callable[..., Any]] = {
    "aten::bernoulli": bernoulli,
    "aten::bernoulli.out": bernoulli_out,
    "aten::bernoulli.p": bernoulli_p,
    "aten::bernoulli_.Tensor": bernoulli_tensor_,
    "aten::bernoulli_.float": bernoulli_,
    "aten::cauchy_": cauchy_,
    "aten::exponential_": exponential_,
    "aten::geometric_": geometric_,
    "aten::log_normal_": log_normal_,
    "aten::multinomial": multinomial,
    "aten::multinomial.out": multinomial_out,
    "aten::native_dropout": native_dropout,
    "aten::normal.Tensor_Tensor": normal_of,
    "aten::normal.Tensor_Tensor_out": normal_of,
    "aten::normal.Tensor_float": normal_of,
    "aten::normal.Tensor_float_out": normal_of,
    "aten::normal.float_Tensor": normal_of,
    "aten::normal.float_Tensor_out": normal_of,
    "aten::normal_": normal_,
    "aten::random_": random_,
    "aten::random_.from": random_from,
    "aten::random_.to": random_to,
    "aten::randperm": randperm,
    "aten::randperm.generator": randperm,
    "aten::randperm.generator_out": randperm_out,
    "aten::randperm.out": randperm_out,
    "aten::uniform_": uniform_,
}
"""Name of an operator -> the function that draws its numbers, of a drawing and the operator's
arguments.
"""

_PYTHONS_WORDS = {"from": "low", "to": "high"}


def named(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's arguments by their names in a function here, without the generator."""
    return {
        _PYTHONS_WORDS.get(name, name): value
        for name, value in arguments.items()
        if name != "generator"
    }
