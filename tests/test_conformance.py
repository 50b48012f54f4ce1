"""The corpus has what real devices did, where recorded; the command records it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from corpus import CASES
from device_facts import FACTS
from places import ROOT, benchmark
from processes import run_python

pytestmark = pytest.mark.one_engine


@pytest.fixture
def conformance() -> Any:
    return benchmark("conformance")


@pytest.fixture
def records(conformance: Any) -> list[Any]:
    found: list[Any] = json.loads(conformance.FILE.read_text())
    assert found
    return found


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """Run the command for two simulated cases; return output and record, twice."""
    file = tmp_path_factory.mktemp("conformance") / "recorded.json"
    words = ["-m", "benchmarks.conformance", "--device", "simulated", "--write", str(file)]
    names = ["lstm_in_evaluation", "results_of_two_graphs_in_one_pool"]
    for _ in range(2):
        ran = run_python(*words, "--only", *names, cwd=ROOT)
        assert ran.returncode == 0, ran.stderr
    return ran.stdout, json.loads(file.read_text())


@pytest.mark.sampled(8, of="long programs")
def test_the_command_records_how_each_case_ended(command: tuple[str, Any]) -> None:
    printed, (record,) = command  # the second run has replaced the first one
    assert record["outcomes"]["lstm_in_evaluation"] == {
        "bug": {
            "error": "RuntimeError",
            "text": "cudnn RNN backward can only be called in training mode",
        },
        "twin": None,
    }
    assert record["device"] == "simulated" and record["torch"]
    assert "2 cases, 0 differences" in printed


@pytest.mark.sampled(1)
def test_a_process_of_its_own_says_how_a_program_ended(conformance: Any) -> None:
    text = "cudnn RNN backward can only be called in training mode"
    asked = conformance.outcome, "lstm_in_evaluation", False, "simulated"
    assert conformance.apart(*asked) == {"error": "RuntimeError", "text": text}


def test_what_was_recorded_on_real_devices_is_what_the_corpus_says(
    conformance: Any, records: list[Any]
) -> None:
    assert all(len(record["outcomes"]) > 150 for record in records)
    found = [
        (record["device"], each)
        for record in records
        for each in conformance.differences(record["outcomes"])
    ]
    assert not found


@pytest.mark.parametrize("name", [name for name in FACTS if name.startswith("allocator")])
def test_the_allocator_has_the_figures_of_a_gpu(
    conformance: Any, records: list[Any], name: str
) -> None:
    """120 steps of a random program with each setting: bytes, counts, peaks, segments."""
    found = conformance.fact(name, "simulated")
    for record in records:
        assert found == record["facts"][name], record["device"]


LIMITS: dict[str, str] = {
    "conversions": "",
    "integers_by_zero": "",
    "grids": "",
    "two_dtypes": "",
    "deterministic": "max_pool3d|bicubic",  # have deterministic kernels since torch 2.13 and 2.15
    # Torch 2.11 took other dropouts with cuDNN, and no groups by "efficient".
    "attention": ".* (dropout|groups)",
    # cuSOLVER has its own errors there. From 2.14 on, combinations use nonzero_static: no wait.
    "captures": ".*: (eigh|qr)" if torch.__version__ < "2.14" else ".*: (eigh|qr|combinations)",
}
"""Fact -> the answers that may differ, as a regular expression: these are of another release, or
known to be wrong.
"""


@pytest.mark.skipif(torch.__version__ < "2.11", reason="the record is of torch 2.11")
@pytest.mark.parametrize("name", LIMITS)
def test_the_simulation_answers_as_a_gpu(conformance: Any, records: list[Any], name: str) -> None:
    found = conformance.fact(name, "simulated")
    for record in records:
        differing = {key for key, value in record["facts"][name].items() if found[key] != value}
        assert {key for key in differing if not re.fullmatch(LIMITS[name], key)} == set(), record[
            "device"
        ]


OPERATORS = [name for name in FACTS if name.startswith("operators")]

NOT_ALIKE = {
    "cov. complex32",
    *(f"bmm.triton_optimized {kind}" for kind in ("int8", "int16", "int32", "int64", "uint8")),
}
"""Operators that an H200 computes and the simulation refuses."""


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the samples differ with each release"
)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_refuse_what_a_gpu_refuses(
    conformance: Any, records: list[Any], name: str
) -> None:
    """By operators' names, because the database's parts differ between releases."""
    found = conformance.fact(name, "simulated")
    assert found.pop("asked") > 300
    for record in records:
        known = {key: value for part in OPERATORS for key, value in record["facts"][part].items()}
        for key, ends in found.items():
            had = [each for each in known.get(key, ["ok"]) if not each.startswith("no samples")]
            has = [each for each in ends if not each.startswith("no samples")]
            # Without samples there is nothing to compare.
            assert key in NOT_ALIKE or not (had and has) or had == has, (key, record["device"])


WRONG: list[tuple[Any, Any]] = [
    (None, None),
    ({"error": "RuntimeError", "text": "something else"}, None),
    ({"error": "RuntimeError", "text": "cudnn RNN backward can only"}, None),
]


@pytest.mark.parametrize(("bug", "twin"), WRONG)
def test_another_outcome_is_a_difference(conformance: Any, bug: Any, twin: Any) -> None:
    (said,) = conformance.differences({"lstm_in_evaluation": {"bug": bug, "twin": twin}})
    assert said.startswith(
        "lstm_in_evaluation: 'cudnn RNN backward can only be called in training mode' was expected"
    )


def test_a_twin_that_fails_is_a_difference(conformance: Any) -> None:
    error = {
        "error": "RuntimeError",
        "text": "cudnn RNN backward can only be called in training mode",
    }
    assert not list(conformance.differences({"lstm_in_evaluation": {"bug": error, "twin": None}}))
    (said,) = conformance.differences({"lstm_in_evaluation": {"bug": error, "twin": error}})
    assert "the correct twin ended with RuntimeError" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_the_device_says_so() -> None:
    ran = run_python("-m", "benchmarks.conformance", "--device", "cuda", cwd=ROOT)
    assert ran.returncode == 2 and "finds no cuda device here" in ran.stderr


def test_each_device_gets_the_cases_that_it_can_show(
    conformance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(device: str) -> set[str]:
        return {case.name for case in CASES if conformance.fits(case, device)}

    assert named("mps") & named("cuda") == set() and "float64_on_a_mac" in named("mps")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "flash_on_a_turing" not in named("cuda") and "flash_in_float32" in named("cuda")
    assert "layers_on_two_gpus" not in named("cuda")
    assert named("simulated") == {case.name for case in CASES}
