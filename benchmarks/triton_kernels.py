"""``python -m benchmarks.triton_kernels``: processor time of kernels, for docs/performance.md.

Each row is measured in a scope and by torch; with ``TRITON_INTERPRET=1`` set, by Triton's own
interpreter and by torch. A name as argument measures the rows that contain it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

import torchdevice

Case = tuple[str, Callable[[], Any], Callable[[], Any]]


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * n + column, mask=column < n, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * n + column, powers / tl.sum(powers, axis=0), mask=column < n)


@triton.jit
def layer_norm(x, out, weight, bias, n, eps, BLOCK: tl.constexpr):
    x += tl.program_id(0) * n
    out += tl.program_id(0) * n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        total += tl.load(x + column, mask=column < n, other=0.0)
    mean = tl.sum(total, axis=0) / n
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        difference = tl.where(
            column < n, tl.load(x + column, mask=column < n, other=0.0) - mean, 0.0
        )
        squares += difference * difference
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < n
        normal = (tl.load(x + column, mask=inside, other=0.0) - mean) * scale
        value = normal * tl.load(weight + column, mask=inside) + tl.load(bias + column, mask=inside)
        tl.store(out + column, value, mask=inside)


@triton.jit
def matmul(a, b, c, M, N, K, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for first in range(0, K, DEPTH):
        k = first + tl.arange(0, DEPTH)
        left = tl.load(
            a + i[:, None] * K + k[None, :], mask=(i[:, None] < M) & (k[None, :] < K), other=0.0
        )
        right = tl.load(
            b + k[:, None] * N + j[None, :], mask=(k[:, None] < K) & (j[None, :] < N), other=0.0
        )
        total = tl.dot(left, right, total)
    tl.store(c + i[:, None] * N + j[None, :], total, mask=(i[:, None] < M) & (j[None, :] < N))


def _cases(device: str) -> Iterator[Case]:
    """Yield what to measure: its name, the launch, and torch's call."""
    for n in (64, 512, 1000, 2048, 4096):
        x = torch.randn(1024, n, device=device)
        launch = partial(
            softmax[(1024,)], x, torch.empty_like(x), n, BLOCK=triton.next_power_of_2(n)
        )
        yield f"softmax, 1024 rows of {n}", launch, partial(x.softmax, -1)
    for n, block in ((512, 512), (4096, 4096), (4096, 1024)):
        x, weight, bias = (torch.randn(*shape, device=device) for shape in ((1024, n), (n,), (n,)))
        name = f"layer norm, 1024 rows of {n}" + (f", blocks of {block}" if block < n else "")
        launch = partial(
            layer_norm[(1024,)], x, torch.empty_like(x), weight, bias, n, 1e-5, BLOCK=block
        )
        yield name, launch, partial(torch.nn.functional.layer_norm, x, (n,), weight, bias)
    for n, rows, depth in (
        (512, 32, 32),
        (512, 64, 64),
        (512, 64, 32),
        (512, 128, 32),
        (500, 64, 32),
    ):
        a, b, c = (torch.randn(n, n, device=device) for _ in range(3))
        launch = partial(matmul[(-(-n // rows),) * 2], a, b, c, n, n, n, ROWS=rows, DEPTH=depth)
        yield f"matmul of {n}, blocks of {rows} by {depth}", launch, partial(torch.matmul, a, b)


def _milliseconds(call: Callable[[], Any]) -> float:
    """Return the least processor time of some calls, after one that is not measured."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 1 and len(times) < 100):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return 1000 * min(times)


def main(only: str) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    interpreted = triton.knobs.runtime.interpret
    print(f"| kernel | {'interpreter' if interpreted else 'scope'} | torch |")
    with contextlib.nullcontext() if interpreted else torchdevice.portable("cpu"):
        for name, launch, by_torch in _cases("cpu" if interpreted else "cuda"):
            if only in name:
                print(
                    f"| {name} | {_milliseconds(launch):.0f} | {_milliseconds(by_torch):.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main("".join(sys.argv[1:]))
