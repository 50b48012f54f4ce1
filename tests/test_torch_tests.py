"""The command that runs PyTorch's own tests, on a small file of tests in their place."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from places import ROOT

sys.path.append(str(ROOT))  # last, so that the installed package is the one that is tested

from benchmarks import torch_tests
from benchmarks.torch_tests import Options, Result

pytestmark = pytest.mark.one_engine

TESTS = """
    import os, unittest
    import torch

    class TestSmall(unittest.TestCase):
        def test_1_two_devices(self):
            self.assertEqual(torch.cuda.device_count(), 2)
            self.assertEqual(str(torch.ones(1, device="cuda:1").device), "cuda:1")

        def test_2_fails(self):
            self.assertEqual(1, 2)

        @unittest.skip("Requires ROCm")
        def test_3_skipped(self):
            pass

        def test_4_ends_the_process(self):
            print("the last words", flush=True)
            os._exit(3)

        def test_5_subtests(self):
            for number in range(3):
                with self.subTest(number):
                    self.assertLess(number, 1)

        @unittest.expectedFailure
        def test_6_expected(self):
            self.assertEqual(1, 2)

    class TestSetUp(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            raise OSError("no set-up")

        def test_1(self):
            pass
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    path = tmp_path_factory.mktemp("checkout") / "test_small.py"
    path.write_text(textwrap.dedent(TESTS))
    return torch_tests.run_file(path, Options(limit=60))


def test_each_test_has_its_outcome(results: list[Result]) -> None:
    assert {each.test: each.outcome for each in results} == {
        "TestSetUp.test_1": "failed",
        "TestSmall.test_1_two_devices": "passed",
        "TestSmall.test_2_fails": "failed",
        "TestSmall.test_3_skipped": "skipped",
        "TestSmall.test_4_ends_the_process": "crashed",
        "TestSmall.test_5_subtests": "failed",
        "TestSmall.test_6_expected": "passed",
    }
    texts = {each.test.partition(".")[2]: each.text for each in results}
    assert "1 != 2" in texts["test_2_fails"] and "the last words" in texts["test_4_ends_the_process"]
    assert "no set-up" in texts["test_1"]


def test_causes_and_figures(results: list[Result]) -> None:
    assert {each.cause for each in results if each.outcome == "skipped"} == {"another platform"}
    page = torch_tests.page(results, "0.0", ("0", "0"))
    assert "| `test_small.py` | 7 | 1 | 6 | 2 | 33.3% |" in page
    assert "| crash: the test ended its process | 1 | `test_4_ends_the_process` |" in page
    assert "| another platform | 1 |" in page and "drawn with seed" not in page
    drawn = torch_tests.page([*results, Result("test_nn.py", "TestNNCUDA.test_1", "passed", "")], "0.0", ("60", "7"))
    assert "(`test_nn.py`), 60 of each file were drawn with seed 7." in drawn


def test_a_process_that_writes_nothing_is_out_of_time(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert torch_tests._watch(process, tmp_path / "notes", 0.2) == "timed out"
    finally:
        process.kill()
        process.wait()


@pytest.mark.sampled(0)
def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    path = tmp_path / "test_broken.py"
    path.write_text("import nothing_of_this_name")
    ((file, test, outcome, text),) = torch_tests.run_file(path, Options(limit=60))
    assert (file, test, outcome) == ("test_broken.py", "the file", "crashed") and "nothing_of_this_name" in text


def test_what_was_not_reached_has_failed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text(
        '{"planned": ["A.b", "A.c"]}\n{"began": "A.b"}\n{"ended": "A.b", "outcome": "passed", "text": ""}\n'
    )
    planned, done, began = torch_tests._read(notes)
    assert (planned, began) == (["A.b", "A.c"], None)
    assert torch_tests._result("f.py", "A.c", done).outcome == "failed"


def test_results_are_kept_and_read_again(
    tmp_path: Path, results: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    file, again = tmp_path / "results.json", tmp_path / "again.json"
    file.write_text(json.dumps([each._asdict() for each in results]))
    assert torch_tests.main([str(tmp_path), "--results", str(file), "--json", str(again)]) == 0
    assert "| `test_small.py` | 7 | 1 | 6 | 2 | 33.3% |" in capsys.readouterr().out
    assert torch_tests._known([again]) == results


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("NotSupportedError: torch._C._cuda_getCheckpointState is not", "allocator: checkpoints of its state"),
        ("urllib.error.URLError: <urlopen error>", "network: the test loads something"),
        ("AssertionError: 1 != 2", torch_tests.OTHER),
    ],
)
def test_the_first_rule_that_applies_is_the_cause(text: str, cause: str) -> None:
    assert Result("test_cuda.py", "TestCuda.test_this", "failed", text).cause == cause
