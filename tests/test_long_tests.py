"""Which of the tests that take long a run by day takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from long_tests import LONG, affordable, recorded
from places import ROOT

pytestmark = pytest.mark.one_engine


class Item(NamedTuple):
    """What is asked of a test that pytest has collected."""

    path: Path
    nodeid: str


NAMES = (
    "a.py::short",
    "a.py::long[1]",
    "a.py::long[2]",
    "a.py::longer",
    "b.py::only_long",
    "c.py::x",
    "d.py::longest",
)
ITEMS: list[Any] = [Item(Path(name.partition("::")[0]), name) for name in NAMES]
SECONDS = {"a.py::long": 2.0, "a.py::longer": 5.0, "b.py::only_long": 20.0, "d.py::longest": 40.0}


@pytest.mark.parametrize("seed", range(8))
def test_as_many_as_fit_are_taken_and_all_short_ones(seed: int) -> None:
    taken = [item.nodeid for item in affordable(ITEMS, seed, SECONDS, 26)]
    assert {"a.py::short", "c.py::x", "b.py::only_long"} <= set(taken)
    cost = sum(SECONDS.get(name.partition("[")[0], 0) for name in taken)
    assert 24 <= cost <= 26 and taken == [item.nodeid for item in ITEMS if item.nodeid in taken]


def test_another_seed_draws_others() -> None:
    drawn = {
        tuple(item.nodeid for item in affordable(ITEMS, seed, SECONDS, 26)) for seed in range(8)
    }
    assert len(drawn) > 1


def test_a_few_files_are_run_whole() -> None:
    assert affordable(ITEMS, 0, SECONDS, 100) == ITEMS


def test_the_record_names_tests_that_are_there() -> None:
    seconds = recorded()
    assert seconds and all(each >= LONG for each in seconds.values())
    for name in seconds:
        file, *_, function = name.split("::")
        assert f"def {function}(" in (ROOT / file).read_text(), (
            f"{name} is no more: take it out of the record"
        )


class Hashed:
    """A test whose place in a set depends on a salt, as that of an object on its address."""

    def __init__(self, nodeid: str, salt: int):
        self.path, self.nodeid, self.salt = Path(nodeid.partition("::")[0]), nodeid, salt

    def __hash__(self) -> int:
        return hash((self.nodeid, self.salt))


def test_addresses_decide_nothing() -> None:
    """Workers of pytest-xdist that draw other tests do not start."""
    alone = {f"{number}.py::only": 1.1 + number * 0.7 % 3 for number in range(40)}
    rest = {f"rest.py::long{number}": 0.1 for number in range(200)}
    names = [*alone, "rest.py::short", *rest]
    # Some of these budgets are spent to the last fraction.
    for budget in (sum(alone.values()) + tenths * 0.1 for tenths in range(1, 150)):
        drawn = {
            tuple(
                item.nodeid
                for item in affordable(
                    [Hashed(name, salt) for name in names],  # type: ignore[misc]
                    1,
                    {**alone, **rest},
                    budget,
                )
            )
            for salt in range(6)
        }
        assert len(drawn) == 1
