"""Philox4x32-10, the generator of torch's CUDA kernels, and how their threads share its numbers.

Philox turns a key and a counter of four words of 32 bits into four random words. cuRAND's key is
the seed, and its counter is the offset divided by 4 (two words) and the number of the thread (two
words), see ``curand_kernel.h``. The algorithm is that of Salmon et al., "Parallel Random Numbers:
As Easy as 1, 2, 3", 2011.

A kernel has blocks of 256 threads, as many as the GPU can run at once or as the tensor needs. Each
thread takes the words of one counter after the other. Of each counter it makes four numbers of 32
bits or two of 64, for elements of the tensor that are as far apart as there are threads
(aten/src/ATen/native/cuda/DistributionTemplates.h). So beyond one wave of threads the numbers of a
seed depend on the model of the GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch

from torchdevice.random_numbers import elementary, scratch
from torchdevice.random_numbers.scratch import CHUNK, Scratch

Words = numpy.ndarray[Any, Any]
"""Words of 32 bits, the lower halves of elements of 64 bits whose upper halves may be anything."""

_BLOCK = 256
"""``block_size_bound``: the threads of a block."""

_PER_CALL = 4
"""``max_generator_offsets_per_curand_call``: by how much a call of cuRAND moves the offset."""

_MASK = 0xFFFFFFFF

_FIRST, _SECOND = 0xD2511F53, 0xCD9E8D57
"""The multipliers."""

_ROUNDS = 10

_WEYL = numpy.array(
    [[turn * 0x9E3779B9 & _MASK, turn * 0xBB67AE85 & _MASK] for turn in range(_ROUNDS)],
    numpy.uint64,
)
"""The summands of the key's two words in each round."""


_UINT64, _FLOAT64 = numpy.dtype(numpy.uint64), numpy.dtype(numpy.float64)


def _constant(value: int) -> Any:
    # NumPy takes an array without dimensions in less time than one of its scalars.
    return numpy.array(value, numpy.uint64)


_BY_FIRST, _BY_SECOND, _LOW = map(_constant, (_FIRST, _SECOND, _MASK))
_SHIFT, _TO_53 = _constant(32), _constant(53 - 32)

_PRODUCTS = numpy.arange(CHUNK, dtype=numpy.uint64) * _BY_SECOND
"""The products of the first threads in the first round."""

_AT_LOW, _AT_HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)
"""Which of the two words of 64 bits in memory is the low one, and which the high one."""


class Gpu(NamedTuple):
    """The properties of a GPU that its numbers depend on.

    Attributes:
        multiprocessors: The number of its multiprocessors.
        threads: How many threads a multiprocessor runs at once.
    """

    multiprocessors: int
    threads: int

    def threads_for(self, elements: int) -> int:
        """Return how many threads a kernel has that fills a tensor (``calc_execution_policy``)."""
        blocks = -(-elements // _BLOCK)
        return _BLOCK * min(blocks, self.multiprocessors * (self.threads // _BLOCK))

    def offsets_for(self, elements: int, unroll: int) -> int:
        """Return the offset's advance by a kernel that takes so many numbers per counter."""
        of_each_call = self.threads_for(elements) * unroll
        calls = -(-elements // of_each_call)
        return calls * _PER_CALL


class Kind(NamedTuple):
    """The way from the words of a counter to a kernel's numbers.

    Attributes:
        name: Its name in compiled code.
        unroll: How many numbers a counter gives.
        dtype: The dtype of the numbers in NumPy.
        numbers: Returns arrays of numbers of the arrays of words, which it may write to, at least
            so many of the ``unroll`` arrays.
        together: How many numbers are made of the same words.
        of_uniform64: Returns the numbers, of a counter's two of :data:`UNIFORM64`; None where
            compiled code makes them.
    """

    name: str
    unroll: int
    dtype: Any
    numbers: Callable[[list[Words], int, Scratch], list[Any]]
    together: int = 1
    of_uniform64: Callable[[list[Any], int, Scratch], list[Any]] | None = None

    def words_for(self, wanted: int) -> int:
        """Return of how many of a counter's words so many of its numbers are made."""
        return -(-wanted // self.together) * self.together * 4 // self.unroll


def _words(words: list[Words], wanted: int, room: Scratch) -> list[Any]:
    return [elementary.narrow(each, room) for each in words[:wanted]]


def _pairs(words: list[Words], wanted: int, room: Scratch) -> list[Any]:
    made = []
    for at in range(wanted):
        high, low = words[2 * at], words[2 * at + 1]
        high <<= _SHIFT
        low &= _LOW
        high |= low
        made.append(high)
    return made


def _uniform(words: list[Words], wanted: int, room: Scratch) -> list[Any]:
    return [elementary.uniform(each, room) for each in words[:wanted]]


def _unit(words: list[Words], wanted: int, room: Scratch) -> list[Any]:
    """Return numbers in [0, 1): a kernel turns 1 to 0 (``uniform_kernel``)."""
    found = _uniform(words, wanted, room)
    for each in found:
        if each.max() == 1:
            each[each == 1] = 0
    return found


def _uniform64(words: list[Words], wanted: int, room: Scratch) -> list[Any]:
    """Return numbers in (0, 1], as ``curand_uniform2_double``."""
    return [_in_unit(words[2 * at], words[2 * at + 1], room) for at in range(wanted)]


def _normal(words: list[Words], wanted: int, room: Scratch) -> list[Any]:
    """Return normal numbers, as ``curand_normal4``."""
    made: list[Any] = []
    for at in range(0, wanted, 2):
        made += elementary.normal(words[at], words[at + 1], wanted - at, room)
    return made


def _in_unit(low: Words, high: Words, room: Scratch) -> Any:
    """Return float64 in (0, 1] of 53 bits: the low word XOR the high one shifted by 21 bits."""
    high &= _LOW
    high <<= _TO_53
    low &= _LOW
    high ^= low
    # By way of signed integers, which NumPy converts faster.
    found = room.array(len(high), _FLOAT64)
    numpy.copyto(found, high.view(numpy.int64))
    found *= 2.0**-53
    found += 2.0**-54
    return found


def _normal64(words: list[Words], wanted: int, room: Scratch) -> list[Any]:
    """Return normal numbers, as ``curand_normal2_double``."""
    numbers = [_in_unit(words[2 * at], words[2 * at + 1], room) for at in range(2)]
    return _box_muller64(numbers, wanted, room)


def _box_muller64(numbers: list[Any], wanted: int, room: Scratch) -> list[Any]:
    """Return radius times sine, and times cosine, of two arrays of numbers in (0, 1]."""
    radius, angle = numbers
    numpy.log(radius, out=radius)
    radius *= -2.0
    numpy.sqrt(radius, out=radius)
    angle *= 2.0 * numpy.pi
    sine = room.array(len(angle), _FLOAT64)
    # Torch computes them in a third of NumPy's time.
    angles = torch.from_numpy(angle)
    torch.sin(angles, out=torch.from_numpy(sine))
    made = [sine]
    if wanted > 1:
        torch.cos(angles, out=angles)
        made.append(angle)
    for each in made:
        each *= radius
    return made


WORDS = Kind("words", 4, numpy.uint32, _words)
PAIRS = Kind("pairs", 2, numpy.uint64, _pairs)
UNIFORM = Kind("uniform", 4, numpy.float32, _uniform)
UNIT = Kind("unit", 4, numpy.float32, _unit)
UNIFORM64 = Kind("uniform64", 2, numpy.float64, _uniform64)
NORMAL = Kind("normal", 4, numpy.float32, _normal, together=2)
NORMAL64 = Kind("normal64", 2, numpy.float64, _normal64, 2, _box_muller64)


class Source(NamedTuple):
    """Where a kernel's numbers begin.

    Attributes:
        seed: The seed of the generator.
        offset: The offset of the generator, a multiple of 4.
    """

    seed: int
    offset: int


Compiled = Callable[[str, int, int, int, int, int], bool]
"""Fills memory: name of the kind, address, number of elements, seed, offset and threads. False: it
has no such kind.
"""

compiled: list[Compiled] = []
"""The compiled function that is in use, if any. It gives the numbers of :func:`fill`, to the bit.
"""


Scaling = Callable[[int, int, float, float, float, float], bool]
"""Multiplies and adds in float32 memory, rounding once: address, number of elements, factor,
summand, and a value that is turned to another one. False: the scope has chosen Python.
"""

scaling: list[Scaling] = []
"""The compiled function that is in use, if any. It equals torch's result by way of float64."""


class _Column:
    """A number of 64 bits for each thread.

    Args:
        whole: The numbers.
    """

    __slots__ = "high", "low", "whole"

    def __init__(self, whole: Words):
        self.whole, words = whole, whole.view(numpy.uint32)
        # From the first low word on, and from the first high one.
        self.low = words[_AT_LOW : len(words) - _AT_HIGH]
        self.high = words[_AT_HIGH : len(words) - _AT_LOW]


@functools.lru_cache(maxsize=64)  # a program draws from few seeds
def _keys(seed: int) -> tuple[list[list[int]], list[list[Any]]]:
    """Return the words of the key in each round, and each with the next round's below it."""
    words = numpy.zeros((_ROUNDS + 1, 2), numpy.uint64)
    words[:_ROUNDS] = (_WEYL + numpy.array(_halves(seed), numpy.uint64)) & _LOW
    joined = words[:-1] << _SHIFT | words[1:]
    return words.tolist(), [[_constant(each) for each in both] for both in joined.tolist()]


def words(
    source: Source, counter: int, first: int, count: int, wanted: int, room: Scratch
) -> list[Words]:
    """Return the first words of ``count`` threads from ``first``, at a counter past the offset.

    Args:
        source: Where the numbers begin.
        counter: The counter.
        first: The first thread.
        count: The number of threads, whose numbers have the same upper word.
        wanted: How many words of each thread to return, or more.
        room: Has the memory.
    """
    # A round makes products of words 0 and 2. New words 0 and 2 are the high words of the product
    # of 2 and of that of 0, XOR words 1 and 3, XOR the key. New words 1 and 3 are the low words of
    # the products. So the high word of a product meets the key of its round, and the low word that
    # of the next: one XOR with both keys serves two rounds.
    columns, products = _begin(source, counter, first, count, room)
    joined = _keys(source.seed)[1]
    full_rounds = _ROUNDS if wanted > 2 else _ROUNDS - 2
    for turn in range(3, full_rounds):
        _to_product(columns[0], _BY_FIRST)
        _to_product(columns[1], _BY_SECOND)
        if turn % 2:
            columns[0].whole ^= joined[turn][1]
        else:
            columns[1].whole ^= joined[turn][0]
        _join(products[1], columns[1])
        _join(products[0], columns[0])
        columns, products = products[::-1], columns
    if wanted > 2:
        return [each.whole for each in (columns[0], products[1], columns[1], products[0])]
    # Word 0 of the last but one round, and word 2 of the last, are used no more.
    _to_product(columns[0], _BY_FIRST)
    _to_product(columns[1], _BY_SECOND)
    columns[1].whole ^= joined[_ROUNDS - 2][0]
    _join(products[0], columns[0])
    _to_product(products[0], _BY_SECOND)
    columns[1].low ^= products[0].high
    return [columns[1].whole, products[0].whole]


def words_of(source: Source, counter: int, thread: int) -> list[int]:
    """Return the four words of one thread."""
    with scratch.borrowed() as room:
        made = words(source, counter, thread, 1, 4, room)
        return [int(each[0]) & _MASK for each in made]


def _begin(
    source: Source, counter: int, first: int, count: int, room: Scratch
) -> tuple[list[_Column], list[_Column]]:
    """Return words 0 and 2 after three rounds, and the third round's products of words 0 and 2.

    Words that are equal in all threads are computed once. The low words of the products have met
    the key of the fourth round.
    """
    one, other = (_Column(room.array(count, _UINT64)) for _ in range(2))
    of_0, of_2 = (_Column(room.array(count, _UINT64)) for _ in range(2))
    low, high = _halves(source.offset // _PER_CALL + counter)
    keys = _keys(source.seed)[0]
    # In the first round only word 2 differs, the number of the thread; in the second only word 0.
    first_of_0 = low * _FIRST
    second_of_2 = (first_of_0 >> 32 ^ first >> 32 ^ keys[0][1]) * _SECOND
    first_of_2 = _PRODUCTS[:count]
    if first:
        first_of_2 = first_of_2 + _constant((first & _MASK) * _SECOND)
    # The first round, and word 0 of the second.
    both_keys = _joined(high ^ keys[0][0], second_of_2 >> 32 ^ keys[1][0])
    numpy.bitwise_xor(first_of_2, both_keys, of_0.whole)
    numpy.right_shift(of_0.whole, _SHIFT, one.whole)
    of_0.whole &= _LOW
    # The second round.
    _to_product(one, _BY_FIRST)
    one.whole ^= _joined(first_of_0 & _MASK ^ keys[1][1], keys[2][1])
    numpy.right_shift(one.whole, _SHIFT, of_2.whole)
    # The third round.
    _to_product(of_0, _BY_FIRST)
    _to_product(of_2, _BY_SECOND)
    of_2.whole ^= _joined(second_of_2 & _MASK ^ keys[2][0], keys[3][0])
    numpy.right_shift(of_2.whole, _SHIFT, other.whole)
    _join(one, of_0)
    return [other, one], [of_0, of_2]


def _joined(high: int, low: int) -> Any:
    return _constant(high << 32 | low)


def _to_product(column: _Column, multiplier: Any) -> None:
    numpy.multiply(column.whole, multiplier, column.whole)


def _join(earlier: _Column, product: _Column) -> None:
    """Make the next words of low words and of the high words of products."""
    earlier.low ^= product.high
    earlier.whole &= _LOW


def _halves(number: int) -> list[int]:
    """Return the low and the high word of a number of 64 bits."""
    return [number & _MASK, number >> 32 & _MASK]


def fill(kind: Kind, out: numpy.ndarray[Any, Any], source: Source, threads: int) -> None:
    """Write the numbers of a kernel with so many threads into an array of one dimension."""
    for each in compiled if kind.of_uniform64 is None else ():
        if each(kind.name, out.ctypes.data, len(out), source.seed, source.offset, threads):
            return
    with scratch.borrowed() as room:
        _fill(kind, out, source, threads, room)


def _fill(
    kind: Kind, out: numpy.ndarray[Any, Any], source: Source, threads: int, room: Scratch
) -> None:
    end = len(out)
    for counter, start in enumerate(range(0, end, threads * kind.unroll)):
        used = min(threads, end - start)
        room.used, rows = 0, None
        if kind.of_uniform64 is not None:
            rows = _compiled_uniform64(source, counter, used, room)
        free = room.used
        for first, count in _chunks(used):
            room.used = free
            # Of the last counter some numbers are beyond the end.
            left = end - start - first
            wanted = min(kind.unroll, -(-left // threads))
            if rows is not None and kind.of_uniform64 is not None:
                found = kind.of_uniform64(list(rows[:, first : first + count]), wanted, room)
            else:
                made = words(source, counter, first, count, kind.words_for(wanted), room)
                found = kind.numbers(made, wanted, room)
            for i, numbers in enumerate(found[:wanted]):
                # The numbers of one counter are as far apart as there are threads.
                place = start + i * threads + first
                length = min(count, end - place)
                out[place : place + length] = numbers[:length]


def _compiled_uniform64(source: Source, counter: int, threads: int, room: Scratch) -> Any:
    """Return rows with the two numbers of each thread's counter; None without compiled code."""
    offset = source.offset + counter * _PER_CALL & (1 << 64) - 1
    for each in compiled:
        count = 2 * threads
        rows = room.array(count, _FLOAT64) if threads <= CHUNK else numpy.empty(count)
        rows = rows.reshape(2, threads)
        if each(UNIFORM64.name, rows.ctypes.data, rows.size, source.seed, offset, threads):
            return rows
    return None


def uniform_of_threads(source: Source, threads: int) -> numpy.ndarray[Any, Any]:
    """Return the numbers of each thread's first ``curand_uniform4``, a row per thread."""
    of_each, rows = (
        numpy.empty(shape, numpy.float32) for shape in ((_PER_CALL, threads), (threads, _PER_CALL))
    )
    # As a kernel with so many threads would fill a tensor of four times as many elements.
    fill(UNIFORM, of_each.reshape(-1), source, threads)
    for place, numbers in enumerate(of_each):
        rows[:, place] = numbers
    return rows


def _chunks(threads: int) -> Iterator[tuple[int, int]]:
    """Yield the first thread and the number of threads of each chunk."""
    for first in range(0, threads, CHUNK):
        yield first, min(CHUNK, threads - first)
