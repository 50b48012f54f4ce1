"""A hint, after long simulated runs, if native kernels would have halved the time.

The simulated allocator counts the results of kernels. For each of them a kernel in Python takes
some microseconds longer than a native one, whatever the size of the tensors, and a short
measurement at the end of the run shows how many microseconds that is on this machine.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import torch

from torchdevice.kernel.python.logs import claim, logger
from torchdevice.native import building

if TYPE_CHECKING:
    from torchdevice.scope.scope import Scope

LONG = 30.0
"""A run that takes fewer seconds of processor time gets no hint."""

SHARE = 0.5
"""The hint is given where native kernels would have saved this part of the time, or more."""

NATIVE = 1.6
"""How many times as long a small addition takes by a native kernel as on the CPU
(docs/performance.md).
"""

_CALLS = 200


def give(scope: Scope) -> None:
    """Log the hint, once in a run, where it holds for the run of this process.

    Args:
        scope: The scope of the program, in which this thread is.
    """
    seconds = time.process_time()
    context = scope._resolved()
    if seconds < LONG or not context.runtime.supplied.is_gpu:
        return
    # Kernels in C++ serve no call that a policy checks.
    if context.policy is not None and context.policy.asks:
        return
    if context.options.native == "never" or building.is_built() or not _compiler():
        return
    count = sum(
        torch.cuda.memory_stats(index)["allocation.all.allocated"]
        for index in range(torch.cuda.device_count())
    )
    saved = count * saved_by_each(context.runtime.device(0))
    if saved >= SHARE * seconds and claim("native kernels would have halved the time"):
        logger.warning(
            f"Kernels in Python took {saved / seconds:.0%} of this run's {seconds:.0f} s of "
            "processor time. 'torchdevice native build' compiles them once, in half a minute."
        )


def saved_by_each(device: torch.device) -> float:
    """Return the seconds a native kernel saves, measured by small additions here and there."""
    here = _seconds_of(torch.ones(4))
    there = _seconds_of(torch.ones(4).to(device))
    return max(0.0, there - NATIVE * here)


def _seconds_of(x: torch.Tensor) -> float:
    """Return the least seconds of processor time of an addition, of five rounds."""
    rounds = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(_CALLS):
            x + x
        rounds.append((time.process_time() - start) / _CALLS)
    return min(rounds)


def _compiler() -> bool:
    return any(map(shutil.which, ("g++", "clang++", "c++", "cl")))
