"""Bugs from public issues end on a simulated device as on the real one, and their correct twins do not."""

from __future__ import annotations

import pytest
from corpus import CASES, FALSE_ALARMS, SILENT, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bug_and_its_twin(case: Case) -> None:
    """Those that are known to be wrong stay in the lists until they are mended."""
    twin = case.run(True)
    assert (twin is not None) == (case.name in FALSE_ALARMS), twin
    assert case.caught() == (case.name not in SILENT), case.run(False)


def test_each_case_names_its_source() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES) and names >= SILENT | FALSE_ALARMS
    assert all("#" in case.source or "." in case.source or "::" in case.source or " " in case.source for case in CASES)


def test_the_rates() -> None:
    found = 1 - len(SILENT) / len(CASES)
    assert found >= 0.96 and len(FALSE_ALARMS) / len(CASES) <= 0.01
