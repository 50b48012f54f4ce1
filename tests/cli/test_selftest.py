"""``torchdevice doctor --selftest``: its checks, its text, and its experiments on a simulated Mac."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from places import ROOT
from test_mps_workarounds import PLANTED, planted

import torchdevice
from torchdevice.cli import main, mps_probes, selftest
from torchdevice.cli.selftest_checks import CHECKS
from torchdevice.mps_workarounds.table import FAULTS
from torchdevice.simulation.profiles import PROFILES

TARGETS = ("cpu", "simulated:cuda", "simulated:mps", "mps-on-simulated")


@pytest.mark.parametrize("target", [pytest.param(target, marks=pytest.mark.sampled(1)) for target in TARGETS])
def test_all_checks_pass(target: str) -> None:
    assert [result for result in selftest.run(target) if result.error] == []


def selftested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], check: Callable[[], None], *flags: str
) -> tuple[int, str]:
    monkeypatch.setattr(selftest, "CHECKS", {"something": check})
    status = main.main(["doctor", "--selftest", "--target", "cpu", *flags])
    return status, capsys.readouterr().out


def fails() -> None:
    raise ValueError(f"two lines\nof {torch.ones(1, device='cuda').tolist()}")


def passes() -> None:
    assert torch.cuda.is_available()


def test_the_text_for_an_issue(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = selftested(monkeypatch, capsys, fails)
    assert status == 1 and "0 passed, 1 failed" in text and "FAILED  something" in text
    assert "ValueError: two lines" in text and "of [1.0]" in text and f"torch {torch.__version__}" in text
    status, text = selftested(monkeypatch, capsys, passes)
    assert status == 0 and "1 passed, 0 failed" in text and "passed  something" in text


def test_the_results_as_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = selftested(monkeypatch, capsys, fails, "--json")
    data = json.loads(text)
    assert status == 1 and data["ok"] is False and data["target"] == "cpu"
    assert data["results"][0]["feature"] == "something" and data["results"][0]["error"].startswith("ValueError")
    assert data["experiments"] == {}, "there is nothing to decide on a CPU"


def test_it_takes_no_paths(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["doctor", "--selftest", "train.py"])
    assert "--selftest takes no PATH" in capsys.readouterr().err


CHOSEN_ON_A_MAC = {"_scaled_dot_product_attention_math_for_mps"}
"""Operators that torch calls for tensors of a real Mac only, where it chooses among kernels."""


class TestExperiments:
    @pytest.fixture(autouse=True)
    def mac(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)
        with torchdevice.simulate("mps", written_for="mps"):
            yield

    def test_what_the_simulated_mac_answers(self) -> None:
        answers, aten = dict(mps_probes.decide()), torch.ops.aten
        for name, operator in (("svd", aten._linalg_svd), ("lu_solve", aten.linalg_lu_solve)):
            lacks_it = PROFILES["mps"].missing(operator.default) is not None  # svd until torch 2.14
            answer = "no; in a scope it runs on the CPU" if lacks_it else "yes"
            assert answers[f"does MPS have linalg_{name}?"] == answer
        assert answers["does MPS have linalg_qr?"] in ("yes", "no; in a scope it runs on the CPU")
        assert answers["is the wrong result of addcmul_ present here?"] == "no"
        assert answers["does a device's index matter in x.device?"] == "mps:0"
        raised = [question for question, answer in answers.items() if "raises" in answer]
        # Its backward is lacked with linalg_lu_solve, until torch 2.14.
        lacks_backward = PROFILES["mps"].missing(torch.ops.aten.linalg_lu_solve.default) is not None
        assert raised == ["is the wrong result of _linalg_solve_ex present here?"] * lacks_backward

    @pytest.mark.filterwarnings("ignore:Warning only once for all operators")
    @pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
    @pytest.mark.parametrize("operator", sorted(mps_probes.GUARDED.keys() - CHOSEN_ON_A_MAC))
    def test_a_fault_that_is_there_is_found(self, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # the backward of a solution
        fault = next(each for each in PLANTED.values() if operator in each.operators)
        assert mps_probes._is_present(mps_probes.GUARDED[operator]) == "no"
        with planted(fault.operators, fault.kernel):
            answers: dict[str, Any] = dict(mps_probes.decide())
        question = "is the wrong result of {} present here?"
        assert answers[question.format(operator)] == "yes"
        others = mps_probes.GUARDED.keys() - {operator}
        assert all(answers[question.format(other)] == "no" for other in others)

    def test_every_experiment_on_a_guard_is_of_a_guard(self) -> None:
        assert mps_probes.GUARDED.keys() <= {name for fault in FAULTS for name in fault.operators}


def test_the_page_of_features_is_made_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import make_matrix

    written = make_matrix.columns_of(make_matrix.PAGE.read_text())
    assert tuple(written) == make_matrix.TARGETS and all(list(cells) == list(CHECKS) for cells in written.values())
    monkeypatch.setattr(selftest, "CHECKS", {"one": passes, "other": fails})
    cells = make_matrix.column("cpu")
    assert cells == {"one": "passed", "other": "**failed**"}
    assert make_matrix.columns_of(make_matrix.page({"cpu": cells})) == {"cpu": cells}


def test_the_table_of_tested_lines_names_what_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import make_tested

    def measured(ran: int, lines: int, taken: int, branches: int) -> dict[str, dict[str, int]]:
        numbers = {"covered_lines": ran, "num_statements": lines, "covered_branches": taken, "num_branches": branches}
        return {"summary": numbers}

    files = {
        "/a/torchdevice/one.py": measured(95, 100, 1, 2),
        "/a/torchdevice/cuda/two.py": measured(94, 100, 4, 4),
        "/a/torchdevice/cuda/__init__.py": measured(0, 0, 0, 0),
        "/a/tests/three.py": measured(0, 9, 0, 0),
    }
    table = make_tested.table({"meta": {"version": "7", "timestamp": "2026-01-02T03:04:05"}, "files": files})
    assert "| `torchdevice` | 1 | 100 | 95.0 % | 2 | 50.0 % |" in table
    assert "| `torchdevice/cuda` | 2 | 100 | 94.0 % | 4 | 100.0 % |" in table
    assert "| all | 3 | 200 | 94.5 % | 6 | 83.3 % |" in table
    assert table.partition("95 %")[2].count("`") == 2 and "| `cuda/two.py` |" in table
