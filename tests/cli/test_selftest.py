"""The tests of one's own device: they pass, have a page, and run on a simulated Mac."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from places import ROOT
from test_mps_workarounds import PLANTED, planted

import torchdevice
import torchdevice_selftest
from torchdevice.calls.lacking.mps_guards import FAULTS
from torchdevice.simulation.profiles import PROFILES
from torchdevice_selftest import GUARDED

sys.path.append(str(ROOT / "docs"))
import make_matrix


@pytest.mark.parametrize(
    "target", [pytest.param(target, marks=pytest.mark.sampled(1)) for target in make_matrix.TARGETS]
)
def test_all_features_work(target: str) -> None:
    written = make_matrix.columns_of(make_matrix.PAGE.read_text())
    assert make_matrix.column(target) == written[target], "docs/matrix.md is made of these results"


CHOSEN_ON_A_MAC = {"_scaled_dot_product_attention_math_for_mps"}
"""Operators that torch calls for tensors of a real Mac only, where it chooses among kernels."""


class TestExperiments:
    @pytest.fixture(autouse=True)
    def mac(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)
        with torchdevice.simulate("mps", written_for="mps"):
            yield

    def test_what_the_simulated_mac_answers(self, capsys: pytest.CaptureFixture[str]) -> None:
        aten, experiments = torch.ops.aten, torchdevice_selftest.TestWhatWaitsForAMac()
        for name, operator in (
            ("linalg_svd", aten._linalg_svd),
            ("linalg_lu_solve", aten.linalg_lu_solve),
        ):
            lacks_it = PROFILES["mps"].missing(operator.default) is not None  # svd until torch 2.14
            experiments.test_whether_mps_has(name)
            answer = "no; in a scope it runs on the CPU" if lacks_it else "yes"
            assert capsys.readouterr().out == f"does MPS have {name}? {answer}\n"
        assert torchdevice_selftest.has("linalg_qr") in (True, False)
        experiments.test_whether_a_fault_is_present("addcmul_")
        experiments.test_how_a_device_is_spelled()
        assert capsys.readouterr().out == (
            "is the wrong result of addcmul_ present here? no\ndoes a device's index matter in "
            "x.device? mps:0\n"
        )
        # Its backward is lacked with linalg_lu_solve, until torch 2.14.
        if PROFILES["mps"].missing(aten.linalg_lu_solve.default) is not None:
            with pytest.raises(NotImplementedError):
                experiments.test_whether_a_fault_is_present("_linalg_solve_ex")

    @pytest.mark.filterwarnings("ignore:Warning only once for all operators")
    @pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
    @pytest.mark.parametrize("operator", sorted(GUARDED.keys() - CHOSEN_ON_A_MAC))
    def test_a_fault_that_is_there_is_found(
        self, operator: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # the backward of a solution
        fault = next(each for each in PLANTED.values() if operator in each.operators)
        assert not torchdevice_selftest.is_present(operator)
        with planted(fault.operators, fault.kernel):
            assert [name for name in GUARDED if torchdevice_selftest.is_present(name)] == [operator]

    def test_every_experiment_on_a_guard_is_of_a_guard(self) -> None:
        assert GUARDED.keys() <= {name for fault in FAULTS for name in fault.operators}


TESTS = """
import pytest

def test_of_one(record_property):
    record_property("feature", "one")
    record_property("on_cpu", 0)

def test_of_other(record_property):
    record_property("feature", "other")
    record_property("on_cpu", 2)

def test_of_third(record_property):
    record_property("feature", "third")
    assert False

def test_of_fourth():
    pytest.skip("is not there")
"""


def test_the_page_of_features_is_made_of_results(tmp_path: Path) -> None:
    tests = tmp_path / "test_features.py"
    tests.write_text(TESTS)
    cells = make_matrix.column("cpu", str(tests))
    assert cells == {"one": "passed", "other": "in part on the CPU", "third": "**failed**"}
    assert make_matrix.columns_of(make_matrix.page({"cpu": cells})) == {"cpu": cells}


def test_the_table_of_tested_lines_names_what_is_below() -> None:
    import make_tested

    def measured(ran: int, lines: int, taken: int, branches: int) -> dict[str, dict[str, int]]:
        numbers = {
            "covered_lines": ran,
            "num_statements": lines,
            "covered_branches": taken,
            "num_branches": branches,
        }
        return {"summary": numbers}

    files = {
        "/a/torchdevice/one.py": measured(95, 100, 1, 2),
        "/a/torchdevice/cuda/two.py": measured(94, 100, 4, 4),
        "/a/torchdevice/cuda/__init__.py": measured(0, 0, 0, 0),
        "/a/tests/three.py": measured(0, 9, 0, 0),
    }
    table = make_tested.table(
        {"meta": {"version": "7", "timestamp": "2026-01-02T03:04:05"}, "files": files}
    )
    assert "| `torchdevice` | 1 | 100 | 95.0 % | 2 | 50.0 % |" in table
    assert "| `torchdevice/cuda` | 2 | 100 | 94.0 % | 4 | 100.0 % |" in table
    assert "| all | 3 | 200 | 94.5 % | 6 | 83.3 % |" in table
    assert table.partition("95 %")[2].count("`") == 2 and "| `cuda/two.py` |" in table
