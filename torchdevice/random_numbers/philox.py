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

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy

from torchdevice.random_numbers import elementary

Words = numpy.ndarray[Any, Any]
"""Words of 32 bits, each in an element of 64 bits."""

_BLOCK = 256
"""``block_size_bound``: the threads of a block."""

_PER_CALL = 4
"""``max_generator_offsets_per_curand_call``: by how much a call of cuRAND moves the offset."""

_MULTIPLIERS = numpy.uint64(0xD2511F53), numpy.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _SHIFT = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)

_CHUNK = 16384
"""Threads that are computed at a time: their words fit into a core's cache."""


class Gpu(NamedTuple):
    """What a GPU's numbers depend on.

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
    """What a kernel makes of the words of a counter.

    Attributes:
        name: Its name, by which compiled code knows it.
        unroll: How many numbers a counter gives.
        dtype: The dtype of the numbers in NumPy.
        numbers: Returns arrays of numbers of the four arrays of words, at least so many of the
            ``unroll`` arrays.
    """

    name: str
    unroll: int
    dtype: Any
    numbers: Callable[[tuple[Words, ...], int], list[Any]]


def _words(words: tuple[Words, ...], wanted: int) -> list[Any]:
    return list(words[:wanted])


def _pairs(words: tuple[Words, ...], wanted: int) -> list[Any]:
    made = []
    for at in range(wanted):
        high, low = words[2 * at], words[2 * at + 1]
        made.append((high << _SHIFT) | low)
    return made


def _uniform(words: tuple[Words, ...], wanted: int) -> list[Any]:
    return [elementary.uniform(each) for each in words[:wanted]]


def _unit(words: tuple[Words, ...], wanted: int) -> list[Any]:
    """Return numbers in [0, 1): a kernel turns 1 to 0 (``uniform_kernel``)."""
    found = _uniform(words, wanted)
    for each in found:
        each[each == 1] = 0
    return found


def _uniform64(words: tuple[Words, ...], wanted: int) -> list[Any]:
    """Return numbers in (0, 1], as ``curand_uniform2_double``."""
    return [_in_unit(words[2 * at], words[2 * at + 1]) for at in range(wanted)]


def _normal(words: tuple[Words, ...], wanted: int) -> list[Any]:
    """Return normal numbers, as ``curand_normal4``."""
    made: list[Any] = []
    for at in range(0, wanted, 2):
        made += elementary.normal(words[at], words[at + 1])
    return made


def _in_unit(low: Words, high: Words) -> Any:
    """Return float64 in (0, 1] of 53 bits: the low word XOR the high one shifted by 21 bits."""
    bits = low ^ (high << numpy.uint64(53 - 32))
    return bits.astype(numpy.float64) * 2.0**-53 + 2.0**-54


def _normal64(words: tuple[Words, ...], wanted: int) -> list[Any]:
    """Return normal numbers, as ``curand_normal2_double``: by Box and Muller, the sine first."""
    radius = numpy.sqrt(-2.0 * numpy.log(_in_unit(words[0], words[1])))
    angle = _in_unit(words[2], words[3]) * (2.0 * numpy.pi)
    return [radius * numpy.sin(angle), radius * numpy.cos(angle)]


WORDS = Kind("words", 4, numpy.uint32, _words)
PAIRS = Kind("pairs", 2, numpy.uint64, _pairs)
UNIFORM = Kind("uniform", 4, numpy.float32, _uniform)
UNIT = Kind("unit", 4, numpy.float32, _unit)
UNIFORM64 = Kind("uniform64", 2, numpy.float64, _uniform64)
NORMAL = Kind("normal", 4, numpy.float32, _normal)
NORMAL64 = Kind("normal64", 2, numpy.float64, _normal64)


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
"""The compiled function that is in use, if any. It gives what torch gives by way of float64."""


def words(source: Source, counter: int, first: int, count: int) -> tuple[Words, ...]:
    """Return four words of ``count`` threads from ``first``, at a counter past the offset."""
    low, high = _halves(source.offset // _PER_CALL + counter)
    key = _halves(source.seed)
    thread = numpy.arange(first, first + count, dtype=numpy.uint64)
    c = [
        numpy.full_like(thread, low),
        numpy.full_like(thread, high),
        thread & _LOW,
        thread >> _SHIFT,
    ]
    products = numpy.empty_like(thread), numpy.empty_like(thread)
    for _ in range(_ROUNDS):
        _round(c, products, key)
        key = [(each + step) & 0xFFFFFFFF for each, step in zip(key, _WEYL, strict=True)]
    return tuple(c)


def _halves(number: int) -> list[int]:
    """Return the low and the high word of a number of 64 bits."""
    return [number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF]


def _round(c: list[Words], products: tuple[Words, Words], key: list[int]) -> None:
    """Do one round of Philox in place."""
    first, second = products
    numpy.multiply(c[0], _MULTIPLIERS[0], out=first)
    numpy.multiply(c[2], _MULTIPLIERS[1], out=second)
    numpy.right_shift(second, _SHIFT, out=c[0])
    c[0] ^= c[1]
    c[0] ^= numpy.uint64(key[0])
    numpy.right_shift(first, _SHIFT, out=c[2])
    c[2] ^= c[3]
    c[2] ^= numpy.uint64(key[1])
    numpy.bitwise_and(second, _LOW, out=c[1])
    numpy.bitwise_and(first, _LOW, out=c[3])


def fill(kind: Kind, out: numpy.ndarray[Any, Any], source: Source, threads: int) -> None:
    """Write the numbers of a kernel with so many threads into an array of one dimension."""
    for each in compiled:
        if each(kind.name, out.ctypes.data, len(out), source.seed, source.offset, threads):
            return
    end = len(out)
    for counter, start in enumerate(range(0, end, threads * kind.unroll)):
        for first, count in _chunks(min(threads, end - start)):
            # Of the last counter some numbers are beyond the end.
            left = end - start - first
            wanted = min(kind.unroll, -(-left // threads))
            found = kind.numbers(words(source, counter, first, count), wanted)
            for i, numbers in enumerate(found[:wanted]):
                # The numbers of one counter are as far apart as there are threads.
                place = start + i * threads + first
                length = min(count, end - place)
                out[place : place + length] = numbers[:length]


def uniform_of_threads(source: Source, threads: int) -> numpy.ndarray[Any, Any]:
    """Return the numbers of each thread's first ``curand_uniform4``, a row per thread."""
    out = numpy.empty((4, threads), numpy.float32)
    # As a kernel with so many threads would fill a tensor of four times as many elements.
    fill(UNIFORM, out.reshape(-1), source, threads)
    return numpy.ascontiguousarray(out.T)


def _chunks(threads: int) -> Iterator[tuple[int, int]]:
    """Yield the first thread and the number of threads of each chunk."""
    for first in range(0, threads, _CHUNK):
        yield first, min(_CHUNK, threads - first)
