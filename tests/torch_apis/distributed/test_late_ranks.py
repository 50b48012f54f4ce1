"""Collectives that go on while the program computes, compared with plain gloo's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import run_command
from places import PROGRAMS


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_collective_ends_when_the_last_rank_has_come(target: str, tmp_path: Path) -> None:
    run = run_command("run", "--target", target, "--ranks", "2", str(PROGRAMS / "late_rank.py"), str(tmp_path))
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        ours, gloos, others = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(ours) == 10 and all(is_completed for _, is_completed, _ in ours.values())
        # gloo itself does not always say of its reduce-scatter that it has ended.
        early, gloos_early = ({name: (each[0], each[2]) for name, each in found.items()} for found in (ours, gloos))
        assert early == gloos_early
        assert rank or not any(was_completed for was_completed, _ in early.values())
        assert others == [[2.0] * 3, [5.0 if rank == 0 else 1.0] * 3, [[2.0] * 3] * 2, [True, True], [8.0] * 3]
