"""Bugs from public issues end on a simulated device as on the real one, and their correct twins do not."""

from __future__ import annotations

import pytest
from corpus import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bug_and_its_twin(case: Case) -> None:
    twin = case.run(True)
    assert twin is None, twin
    assert case.caught(), case.run(False)


def test_each_case_names_its_source() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert all("#" in case.source or "." in case.source or "::" in case.source or " " in case.source for case in CASES)
