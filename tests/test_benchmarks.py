"""The benchmark command runs and says what it is asked for; what it measures differs by machine."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import run_python

ROOT = Path(__file__).parent.parent


def test_a_case_as_a_table_and_as_json(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ran = run_python("-m", "benchmarks", "--rounds", "3", "--only", "x.device", "--json", str(figures), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "do-nothing mode" in ran.stdout and "cpu target" in ran.stdout
    timings = json.loads(figures.read_text())["cases"]["x.device"]
    assert set(timings) == {"bare", "do-nothing mode", "torch.device", "cpu target"}
    assert all(lower <= median <= upper and lower > 0 for median, lower, upper in timings.values())


def test_growth_is_drawn(tmp_path: Path) -> None:
    plot = tmp_path / "growth.svg"
    ran = run_python("-m", "benchmarks", "--rounds", "3", "--only", "growth", "--plot", str(plot), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert plot.read_text().count("<polyline") == 4
