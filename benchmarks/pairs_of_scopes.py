"""Two threads: one computes in a scope, and one enters and leaves scopes of another kind.

``python -m benchmarks.pairs_of_scopes ONE OTHER --seconds 10`` ends with an error where a result
differs from the first, and by a signal where a thread runs a kernel that is no more.
``tests/attack/test_pairs_of_scopes.py`` runs all pairs, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import torchdevice
from torchdevice.native import building

NATIVE = "native"
"""The kind that needs the kernels in C++."""


def _training(device: str) -> Callable[[], list[torch.Tensor]]:
    """Return a function that repeats a computation: products, losses in autocast, backward."""
    torch.manual_seed(0)
    x = torch.randn(8, 8, device=device)
    weight = torch.randn(8, 8, device=device, requires_grad=True)

    def compute() -> list[torch.Tensor]:
        y = (
            torch.nn.functional.layer_norm(x @ weight, (8,))
            .addcmul(x, x)
            .index_select(0, torch.arange(8, device=device))
        )
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.mse_loss(torch.bmm(y[None], x[None])[0], x)
        (gradient,) = torch.autograd.grad(loss.float() + y.square().mean(), [weight])
        values = torch.linalg.eigh(x @ x.t())[0]
        return [each.detach() for each in (y, loss, gradient, values)]

    return compute


def _replaying(device: str) -> Callable[[], list[torch.Tensor]]:
    """Return a function that replays a captured graph."""
    x, graph = torch.ones(8, 8, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x @ x).relu()

    def compute() -> list[torch.Tensor]:
        graph.replay()
        return [y]

    return compute


SCOPES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "cpu": lambda: torchdevice.portable("cpu"),
    "cuda": lambda: torchdevice.simulate(native="never"),
    NATIVE: lambda: torchdevice.simulate(native="always"),
    "mps": lambda: torchdevice.simulate("mps"),
    "verify": lambda: torchdevice.simulate(verify=True),
    "races": lambda: torchdevice.simulate(races="error"),
    "meta": lambda: torchdevice.simulate(compute="meta"),
    "capture": lambda: torchdevice.simulate(native="never"),
}
"""The kinds of scopes. A thread of the kind ``none`` is in none, and computes on the CPU."""


class _Round:
    """How long two threads go on: seconds after both made a first step, or until one fails."""

    def __init__(self, seconds: float):
        self.counts = [0, 0]
        self.error: BaseException | None = None
        self._seconds = seconds
        self._until: float | None = None

    def goes_on(self) -> bool:
        if self.error is not None:
            return False
        if self._until is None and all(self.counts):
            self._until = time.monotonic() + self._seconds
        return self._until is None or time.monotonic() < self._until

    def thread(self, do: Callable[[], None]) -> threading.Thread:
        """Return a thread that keeps the error of what it does."""

        def kept() -> None:
            try:
                do()
            except BaseException as error:
                self.error = error

        return threading.Thread(target=kept)


def run(one: str, other: str, seconds: float) -> tuple[int, int]:
    """Compute in a scope of one kind, and enter and leave one of another kind meanwhile.

    Returns:
        How often the first thread computed, and how often the second one entered.

    Raises:
        AssertionError: The results were not the same each time.
    """
    both = _Round(seconds)

    def computes() -> None:
        with SCOPES[one]():
            compute = _of(one)
            first = [_read(one, each) for each in compute()]
            while both.goes_on():
                for known, found in zip(first, compute(), strict=True):
                    assert torch.equal(known, _read(one, found)), (
                        f"{one} beside {other}: another result"
                    )
                both.counts[0] += 1

    def enters() -> None:
        while both.goes_on():
            with SCOPES[other]():
                _of(other)()
            both.counts[1] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [both.thread(computes), both.thread(enters)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if both.error is not None:
        raise both.error
    return both.counts[0], both.counts[1]


def _of(kind: str) -> Callable[[], list[torch.Tensor]]:
    if kind == "capture":
        return _replaying("cuda")
    return _training("cpu" if kind == "none" else "cuda")


def _read(kind: str, result: torch.Tensor) -> torch.Tensor:
    """Return a result on the CPU; of a kind without values a tensor of its shape."""
    return torch.zeros(result.shape) if kind == "meta" else result.cpu().clone()


def kinds() -> list[str]:
    """Return the kinds of scopes that this machine has."""
    return [kind for kind in SCOPES if kind != NATIVE or building.is_built()]


def main() -> None:
    """Run one pair."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pairs_of_scopes", description=__doc__
    )
    parser.add_argument("one", choices=SCOPES, help="the kind of scope in which a thread computes")
    parser.add_argument(
        "other", choices=SCOPES, help="the kind of scope that another thread enters and leaves"
    )
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    computed, entered = run(options.one, options.other, options.seconds)
    print(
        f"{options.one} beside {options.other}: computed {computed} times, entered {entered} times"
    )


if __name__ == "__main__":
    main()
