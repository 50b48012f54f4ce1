"""GPU threads in torch's random kernels, one after the other, in Python's integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy

MASK = 2**32 - 1


def philox(seed: int, counter: int, thread: int) -> tuple[int, int, int, int]:
    """Return the four words of a counter."""
    c = [counter & MASK, counter >> 32 & MASK, thread & MASK, thread >> 32]
    key = [seed & MASK, seed >> 32 & MASK]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ key[0], second & MASK, first >> 32 ^ c[3] ^ key[1], first & MASK]
        key = [key[0] + 0x9E3779B9 & MASK, key[1] + 0xBB67AE85 & MASK]
    return c[0], c[1], c[2], c[3]


def grid_of(multiprocessors: int, threads: int, count: int) -> int:
    """Return the number of blocks, of 256 threads."""
    return min(-(-count // 256), multiprocessors * (threads // 256))


def grid_stride(grid: int, count: int, unroll: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield element, thread, call and place in the call, for ``distribution_nullary_kernel``."""
    threads = grid * 256
    rounded = ((count - 1) // (threads * unroll) + 1) * threads * unroll
    for thread in range(threads):
        for call, start in enumerate(range(thread, rounded, threads * unroll)):
            for i in range(unroll):
                if start + threads * i < count:
                    yield start + threads * i, thread, call, i


def expected(
    seed: int,
    offset: int,
    grid: int,
    count: int,
    unroll: int,
    number: Callable[..., object],
    dtype: object,
) -> numpy.ndarray:
    """Return a tensor's elements, each from its thread's words and its place."""
    out = numpy.zeros(count, dtype)  # type: ignore[call-overload]
    for element, thread, call, i in grid_stride(grid, count, unroll):
        out[element] = number(philox(seed, offset // 4 + call, thread), i)
    return out


def uniform(word: int) -> float:
    """Return the number in (0, 1] of a word."""
    return float(numpy.float32(word) * numpy.float32(2.0**-32) + numpy.float32(2.0**-33))
