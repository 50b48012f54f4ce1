"""The command for packages' tests on their stand-ins, on a package made here."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from places import benchmark

pytestmark = pytest.mark.one_engine

SOURCE = """
import torch.nn.functional as F
import kernels_of_nvcc

def _whole(x, weight):
    return F.conv1d(x, weight[:, None], padding=weight.shape[1] - 1, groups=len(weight))

@kernels_of_nvcc.compiled
def causal_conv1d_ref(x, weight):
    return _whole(x, weight)[..., : x.shape[-1]]
"""

TESTS = """
import pytest
import torch
from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_ref

@pytest.mark.parametrize("length", range(1, 40))
def test_convolution(length):
    x, weight = torch.randn(2, 3, length, device="cuda"), torch.randn(3, 4, device="cuda")
    torch.testing.assert_close(causal_conv1d_fn(x, weight), causal_conv1d_ref(x, weight))

def test_that_fails():
    assert causal_conv1d_fn is causal_conv1d_ref

def test_that_skips():
    pytest.skip("no such machine")
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    package = tmp_path / "causal-conv1d"
    (package / "causal_conv1d").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "causal_conv1d" / "causal_conv1d_interface.py").write_text(SOURCE)
    (package / "tests" / "test_made.py").write_text(TESTS)
    return tmp_path


def test_a_sample_of_a_packages_tests(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = benchmark("package_tests")
    monkeypatch.setattr(
        command, "SUITES", (command.Suite("causal-conv1d", "1.0", "test_made.py", 5),)
    )
    written: list[str] = []
    monkeypatch.setattr(
        command, "record", lambda rows: written.extend(json.dumps(each) for each in rows)
    )
    assert command.main([str(sources), "--target", "cpu", "--seed", "3", "--write"]) == 1
    (row,) = map(json.loads, written)
    assert (row["passed"], row["failed"], row["skipped"]) == (5, 1, 1)
    assert (row["target"], row["seed"], row["sample"]) == ("cpu", 3, 5)


def test_a_row_replaces_that_of_the_same_file_and_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = benchmark("package_tests")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    first, second = (suite._asdict() for suite in command.SUITES[:2])
    command.record([{**second, "target": "cpu", "passed": 1}])
    command.record(
        [{**first, "target": "cpu", "passed": 2}, {**second, "target": "cpu", "passed": 3}]
    )
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [(row["file"], row["passed"]) for row in kept] == [
        (first["file"], 2),
        (second["file"], 3),
    ]


def test_tests_that_are_a_package_get_what_the_stand_in_lacks(tmp_path: Path) -> None:
    files = {
        "xformers/__init__.py": "",
        "xformers/helpers.py": "from xformers.ops import also_there\n",
        "xformers/ops/__init__.py": """
            from .fmha import lacking

            class RMSNorm:
                "Not taken, because the stand-in has one."

            def also_there():
                return lacking() + 1
        """,
        "xformers/ops/fmha/__init__.py": "def lacking():\n    return 1\n",
        "tests/__init__.py": "",
        "tests/utils.py": "from xformers.helpers import also_there\n",
        "tests/test_made.py": """
            import torch
            from xformers.ops import RMSNorm
            from .utils import also_there

            def test_both():
                assert also_there() == 2 and issubclass(RMSNorm, torch.nn.Module)
        """,
    }
    for name, text in files.items():
        path = tmp_path / "xformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    command = benchmark("package_tests")
    row = command.run(command.Suite("xformers", "1.0", "test_made.py"), tmp_path, "cpu", 0, 60)
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 0, 0)
