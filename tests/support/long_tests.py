"""Long tests: which of them run by day, and how their seconds are recorded.

Four fifths of the processor time of all tests is that of some two hundred tests, each of which
starts interpreters, ranks, trainers or compilers. A run by day takes some of them, drawn with the
seed: as many as fit in :data:`BUDGET`, and first one of each file that has no other tests, unless
it takes longer than :data:`ALONE`. So a run of a few files takes all of them.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("seconds.json")

LONG = 1.0
"""From how many seconds on a test is long. Others are not recorded."""

SLOW = 5.0
"""From how many seconds on a test whose seconds are not recorded is named at the end of a run."""

BUDGET = 170.0
"""How many seconds the long tests of a run by day may take together."""

ALONE = 20.0
"""How many seconds a test may take that stands for a file without short tests."""


def function_of(test: pytest.Item | pytest.TestReport) -> str:
    """Return the name of a test without its case, by which its seconds are recorded."""
    return test.nodeid.partition("[")[0]


def recorded() -> dict[str, float]:
    """Return the seconds that one case of each long test took when they were last recorded."""
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def affordable(
    items: Sequence[pytest.Item], seed: int, seconds: Mapping[str, float], budget: float = BUDGET
) -> list[pytest.Item]:
    """Return the tests without the long ones that a run by day leaves out. The order is kept.

    Args:
        items: The tests.
        seed: Draws the long tests.
        seconds: Those of one case of each long test, by function.
        budget: How many seconds the long tests may take, if those of files without others leave
            anything.
    """
    long_ones = [item for item in items if function_of(item) in seconds]
    drawn = random.Random(f"{seed} long tests").sample(long_ones, len(long_ones))
    with_others = {item.path for item in items if function_of(item) not in seconds}
    alone = [
        item
        for item in drawn
        if item.path not in with_others and seconds[function_of(item)] <= ALONE
    ]
    of_files = list({item.path: item for item in alone}.values())
    # Not of a set, whose order depends on addresses: the sum of fractions depends on their order,
    # and workers of which one can afford a test more do not start.
    left = budget - sum(seconds[function_of(item)] for item in of_files)
    kept = set(of_files)
    for item in drawn:
        cost = seconds[function_of(item)]
        if item not in kept and cost <= left:
            kept.add(item)
            left -= cost
    left_out = set(long_ones) - kept
    return [item for item in items if item not in left_out]


class Recording:
    """A pytest plugin that records seconds of run tests in :data:`FILE`, and keeps others."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the seconds of a case's setup, its call or its teardown."""
        self.seconds[function_of(report)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the means of the tests' cases."""
        means = {name: sum(cases.values()) / len(cases) for name, cases in self.seconds.items()}
        kept = {name: each for name, each in recorded().items() if name not in means}
        kept.update({name: round(each, 1) for name, each in means.items() if each >= LONG})
        FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
