"""Interleaved rounds: each times every condition once, so a slow moment affects all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

Condition = Callable[[], AbstractContextManager[object]]
"""Makes the context manager in which a call is timed."""


class Timing(NamedTuple):
    """Microseconds of one call: the median of the rounds, and the quartiles around it."""

    median: float
    lower: float
    upper: float


def compare(
    conditions: Mapping[str, Condition],
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    seconds: float = 0.02,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, Timing]:
    """Time a call under each condition.

    Args:
        conditions: Name -> condition. It is entered in each round; entering is not timed.
        calls: Name -> the call to time under that condition.
        rounds: The number of measurements per condition.
        seconds: The approximate duration of one measurement.
        clock: Returns nanoseconds. ``time.process_time_ns`` leaves out the time of other processes.

    Returns:
        Name -> microseconds of a call.
    """
    number = _calls_within(conditions, calls, seconds, clock)
    turns: dict[str, list[float]] = {name: [] for name in conditions}
    for _ in range(rounds):
        for name, condition in conditions.items():
            with condition():
                calls[name]()
                turns[name].append(_timed(calls[name], number, clock))
    return {name: timing(times) for name, times in turns.items()}


def timing(times: list[float]) -> Timing:
    """Return the median and the quartiles of times in microseconds."""
    lower, median, upper = statistics.quantiles(times, n=4)
    return Timing(median, lower, upper)


def _calls_within(
    conditions: Mapping[str, Condition],
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    clock: Callable[[], int],
) -> int:
    slowest = 0.0
    for name, condition in conditions.items():
        with condition():
            calls[name]()
            slowest = max(slowest, _timed(calls[name], 1, clock))
    return max(1, int(seconds * 1e6 / max(slowest, 0.05)))


def _timed(call: Callable[[], object], number: int, clock: Callable[[], int]) -> float:
    """Return the mean microseconds of ``number`` calls, without garbage collection."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        for _ in range(number):
            call()
        return (clock() - start) / number / 1000
    finally:
        if collecting:
            gc.enable()
