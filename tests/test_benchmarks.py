"""The benchmark command runs and prints the figures it is asked for; their values depend on the machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import run_python

pytestmark = pytest.mark.one_engine

ROOT = Path(__file__).parent.parent


def test_a_case_as_a_table_and_as_json(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ran = run_python("-m", "benchmarks", "--rounds", "3", "--only", "x.device", "--json", str(figures), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "do-nothing mode" in ran.stdout and "cpu target" in ran.stdout
    timings = json.loads(figures.read_text())["cases"]["x.device"]
    assert set(timings) == {"bare", "do-nothing mode", "torch.device", "cpu target", "cpu target, wrap"}
    assert all(lower <= median <= upper and lower > 0 for median, lower, upper in timings.values())


def test_moves_against_a_bare_to(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ("--transfers", "--rounds", "3", "--only", "4 elements", "--json", str(figures))
    ran = run_python("-m", "benchmarks", *arguments, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(figures.read_text())["transfers"]
    assert len(found) == 6 and all(set(timings) == {"x.to(device)", "ToDevice"} for timings in found.values())


def test_half_precision_against_float32(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    ran = run_python(
        "-m", "benchmarks", "--half", "--rounds", "3", "--only", "linear", "--json", str(figures), cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    (timings,) = json.loads(figures.read_text())["half precision"].values()
    dtypes = {"float32", "float16", "bfloat16"}
    assert set(timings) == dtypes | {f"{name}, products by torch" for name in dtypes - {"float32"}}


def test_growth_is_drawn(tmp_path: Path) -> None:
    plot = tmp_path / "growth.svg"
    ran = run_python("-m", "benchmarks", "--rounds", "3", "--only", "growth", "--plot", str(plot), cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert plot.read_text().count("<polyline") == 4


def test_instructions_are_counted_where_valgrind_is() -> None:
    ran = run_python("-m", "benchmarks", "--instructions", "--only", "ordinary", cwd=ROOT)
    if shutil.which("valgrind") is None:
        assert ran.returncode == 1 and "valgrind is not installed" in ran.stderr
        return
    assert ran.returncode == 0, ran.stderr
    bare, nothing, _, ours, wrapped = (int(count.replace(",", "")) for count in ran.stdout.split("elements")[1].split())
    assert bare < nothing and ours < 1.05 * nothing and wrapped < 1.02 * bare
