"""``torchdevice doctor --report``: the text that somebody with a Mac sends."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_command

from torchdevice.tools.cli import doctor_report
from torchdevice.tools.cli.diagnostics import Finding

pytestmark = pytest.mark.one_engine

TESTS = """
import os
import pytest

def test_of_one(record_property):
    record_property("feature", "matrix products")
    print("does it matter?", os.environ["TORCHDEVICE_TARGET"])

def test_of_another():
    assert 1 + 1 == 3, "one and one are two"

def test_of_a_third():
    pytest.skip("waits for a Mac")
"""

FINDINGS = [
    Finding("device", "ok", "mps would stand in: Apple M3 (asked for)"),
    Finding("compiler", "ok", "/Users/somebody/bin/g++, for torch.compile"),
]


def test_results_become_a_text(tmp_path: Path) -> None:
    tests = tmp_path / "test_features.py"
    tests.write_text(TESTS)
    found = doctor_report.results("simulated:mps", str(tests))
    assert [(each.feature, each.outcome) for each in found] == [
        ("matrix products", "passed"),
        ("of another", "failed"),
        ("of a third", "left out"),
    ]
    said = doctor_report.text("mps", FINDINGS, found)
    assert said.startswith("# torchdevice on mps: 1 of 2 passed\n")
    assert "| matrix products | passed |" in said and "third" not in said
    assert "matrix products:\n\n```text\ndoes it matter? simulated:mps\n```" in said
    assert "one and one are two" in said and "Apple M3" in said
    assert "somebody" not in said, "the text names a folder of whoever sends it"


def test_tests_that_do_not_run_are_an_error() -> None:
    with pytest.raises(OSError, match="did not run"):
        doctor_report.results("cpu", "no_such_module_of_tests")


@pytest.mark.sampled(1)
def test_the_command(tmp_path: Path) -> None:
    done = run_command("doctor", "--target", "simulated:mps", "--report=mac.md", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = (tmp_path / "mac.md").read_text()
    assert said.startswith("# torchdevice on simulated:mps: 2") and " failed " not in said
    assert done.stdout == "" and "Please send this text to" in done.stderr


def test_a_target_that_is_not_there_runs_no_tests() -> None:
    done = run_command("doctor", "--target", "xpu", "--report")
    assert done.returncode == 1 and "problem  device" in done.stdout
    assert "running the tests" not in done.stderr


def test_text_and_data_contradict_each_other() -> None:
    done = run_command("doctor", "--json", "--report")
    assert done.returncode == 2 and "--report is a text, and --json asks for data" in done.stderr
