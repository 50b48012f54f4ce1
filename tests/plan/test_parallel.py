"""A plan of one rank of a program divided by tensors or in a pipeline, compared with that rank
among all ranks.
"""

from __future__ import annotations

import re

import pytest
from places import PROGRAMS
from processes import run_command

pytestmark = pytest.mark.one_engine

PROGRAM = str(PROGRAMS / "planned_parallel.py")


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.parametrize("kind", ["tensors", "pipeline"])
def test_a_planned_rank_has_the_memory_of_a_rank_that_ran(kind: str) -> None:
    ran = run_command("run", "--target", "simulated:cuda", "--ranks", "2", PROGRAM, kind)
    planned = run_command("plan", "--world-size", "2", PROGRAM, kind)
    assert ran.returncode == planned.returncode == 0, ran.stderr + planned.stderr
    peaks = [re.findall(r"(?m)^peak \d+ \d+$", each.stdout) for each in (ran, planned)]
    assert peaks[0] == peaks[1] and len(peaks[0]) == 1
    assert "optimizer state" in planned.stdout
