"""Public bugs end alike on real and simulated devices, and their correct twins run."""

from __future__ import annotations

import pytest
import torch
from corpus import (
    CASES,
    COMPILED,
    FALSE_ALARMS,
    FIRST_PART,
    MACS,
    MENDED_IN_TORCH,
    SECOND_PART_END,
    SILENT,
    SILENT_AT_FIRST,
    Case,
)

from torchdevice.simulation import inductor


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bug_and_its_twin(case: Case) -> None:
    """Those that are known to be wrong stay in the lists until they are mended."""
    if case.kind == COMPILED and inductor._missing_compiler():
        pytest.skip("Inductor needs a C++ compiler")
    twin = case.run(True)
    assert (twin is not None) == (case.name in FALSE_ALARMS), twin
    is_mended = case.name in MENDED_IN_TORCH and torch.__version__ >= MENDED_IN_TORCH[case.name]
    assert case.caught() == (case.name not in SILENT and not is_mended), case.run(False)


def test_each_case_names_its_source() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES) and names >= SILENT | FALSE_ALARMS
    assert all(
        "#" in case.source or "." in case.source or "::" in case.source or " " in case.source
        for case in CASES
    )


def test_the_rates() -> None:
    macs = [case.name for case in CASES if case.kind == MACS]
    gpus = [case.name for case in CASES if case.kind != MACS]
    assert (
        len(SILENT.intersection(gpus)) / len(gpus) <= 0.05
        and len(SILENT.intersection(macs)) / len(macs) <= 0.12
    )
    assert len(SILENT) / len(CASES) <= 0.04 and len(FALSE_ALARMS) / len(CASES) <= 0.01


def test_what_was_not_found_at_first_is_of_the_second_part_and_found_now() -> None:
    second = {case.name for case in CASES[FIRST_PART:SECOND_PART_END]}
    assert second - SILENT > SILENT_AT_FIRST
