"""Measure what the simulated device costs, as ratios to the plain CPU in one process: rounds interleaved, medians.

Run as ``python docs/measure_simulation.py`` on an idle machine; needs the [hf] extra.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import torchdevice

ROUNDS = 15


def gpt2_step(device: str) -> Callable[[], Any]:
    """Return a training step of a tiny GPT-2: 2 layers, 64 wide, batches of 4 x 32 tokens."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (4, 32)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def operator(function: Callable[..., Any], *shape: int) -> Callable[[str], Callable[[], Any]]:
    """Return what makes a call of a binary operator on a device."""

    def make(device: str) -> Callable[[], Any]:
        x = torch.ones(*shape).to(device)
        return lambda: function(x, x)

    return make


CASES: list[tuple[str, Callable[[str], Callable[[], Any]], int]] = [
    ("add, 4 elements", operator(torch.add, 4), 2000),
    ("add in place, 4 elements", operator(torch.Tensor.add_, 4), 2000),
    ("view", lambda device: torch.ones(4, 4).to(device).t, 2000),
    ("matmul, 64 x 64", operator(torch.mm, 64, 64), 1000),
    ("matmul, 512 x 512", operator(torch.mm, 512, 512), 20),
    ("matmul, 1024 x 1024", operator(torch.mm, 1024, 1024), 5),
    ("training step of a tiny GPT-2", gpt2_step, 3),
]


def seconds(call: Callable[[], Any], count: int) -> float:
    """Return the time of one call, the mean of ``count``."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, medians of {ROUNDS} interleaved rounds\n")
    print("| | CPU, us | simulated, us | ratio |\n|---|---|---|---|")
    for name, make, count in CASES:
        plain = make("cpu")
        scope = torchdevice.simulate()
        with scope:
            simulated = make("cuda")
            seconds(simulated, count)
        seconds(plain, count)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            times[0].append(seconds(plain, count))
            with scope:
                times[1].append(seconds(simulated, count))
        one, other = (statistics.median(each) * 1e6 for each in times)
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        print(f"| {name} | {one:.1f} | {other:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
