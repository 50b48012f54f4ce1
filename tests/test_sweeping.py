"""The sample of the tests marked ``sampled``, which the default run takes."""

from __future__ import annotations

from typing import Any

import pytest
import sweeping

pytestmark = pytest.mark.one_engine


class Case:
    """What ``sweeping.sample`` asks of a test."""

    def __init__(self, nodeid: str, size: int | None, **group: str) -> None:
        self.nodeid = nodeid
        self.mark = None if size is None else pytest.mark.sampled(size, **group).mark

    def get_closest_marker(self, name: str) -> Any:
        return self.mark if name == "sampled" else None


MANY = [Case(f"test_a.py::test_many[{n}]", 3) for n in range(50)]
OTHERS = [Case(f"test_a.py::test_other[{n}]", 3) for n in range(50)]
FEW = [
    Case("test_b.py::TestB::test_few[0]", 3),
    Case("test_b.py::TestB::test_few[1]", 3),
    Case("test_b.py::test_one", 3),
]
UNMARKED = [Case(f"test_b.py::test_unmarked[{n}]", None) for n in range(9)]


def test_each_function_keeps_as_many_cases_as_its_mark_says() -> None:
    kept = sweeping.sample([*MANY, *OTHERS, *FEW, *UNMARKED], 0)
    assert [len(kept & set(cases)) for cases in (MANY, OTHERS, FEW, UNMARKED)] == [3, 3, 3, 9]


def test_a_seed_draws_the_same_in_every_run_whatever_else_is_collected() -> None:
    assert sweeping.sample(MANY, 7) == sweeping.sample([*FEW, *OTHERS, *MANY], 7) & set(MANY)
    # Every worker and every interpreter draws these, whatever its seed of hashes.
    drawn = {f"test_a.py::test_many[{n}]" for n in (16, 26, 42)}
    assert {case.nodeid for case in sweeping.sample(MANY, 7)} == drawn


def test_a_group_keeps_as_many_functions_as_its_mark_says() -> None:
    names = [
        "test_a.py::test_long",
        *(f"test_b.py::TestB::test_{letter}[{n}]" for letter in "bcd" for n in range(9)),
    ]
    group = [Case(name, 2, of="of both files") for name in names]
    drawn = [sweeping.sample([*group, *MANY], seed) & set(group) for seed in range(60)]
    assert all(
        len({case.nodeid.partition("[")[0] for case in cases}) == len(cases) == 2 for cases in drawn
    )
    assert drawn[:9] == [sweeping.sample(group, seed) for seed in range(9)]
    assert sum(group[0] in cases for cases in drawn) > 15 and len(set().union(*drawn)) > 20


class OnTargets(Case):
    def __init__(self, name: str, **given: Any) -> None:
        super().__init__(f"test_c.py::{name}[{'-'.join(map(str, given.values()))}]", None)
        if given:
            self.callspec = type("", (), {"params": given})


def test_each_test_keeps_one_target() -> None:
    tests = [
        OnTargets("test_a", target=target, number=n) for target in ("cpu", "mps") for n in range(20)
    ]
    others = [OnTargets("test_b", number=n) for n in range(3)] + [OnTargets("test_c")]
    drawn = set(sweeping.on_one_target([*tests, *others], 1))
    given = [test.callspec.params for test in drawn & set(tests)]
    assert drawn >= set(others) and sorted(each["number"] for each in given) == [*range(20)]
    assert {each["target"] for each in given} == {"cpu", "mps"}
    assert drawn | set(sweeping.on_one_target([*tests, *others], 2)) == {*tests, *others}


def test_seeds_together_draw_every_case() -> None:
    assert set().union(*(sweeping.sample(MANY, seed) for seed in range(200))) == set(MANY)
