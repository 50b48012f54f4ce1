"""The command that runs PyTorch's own tests, on a small file of tests in their place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from places import ROOT

sys.path.append(str(ROOT))  # last, so that the installed package is the one that is tested

from benchmarks import torch_tests
from benchmarks.torch_tests import Options, Result, Suite, Work

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
    return torch_tests.run_file(Work(path, path.name), Options(limit=60))


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
    assert (
        "1 != 2" in texts["test_2_fails"] and "the last words" in texts["test_4_ends_the_process"]
    )
    assert "no set-up" in texts["test_1"]


def test_causes_and_figures(results: list[Result]) -> None:
    assert {each.cause[1] for each in results if each.outcome == "skipped"} == {"another platform"}
    page = torch_tests.page(results, "0.0", ("0", "0"))
    assert "| `test_small.py` | 1 | 0 | 7 | 1 | 6 | 2 | 33.3% |" in page
    assert "| ours | the test ended its process | 1 | `test_4_ends_the_process` |" in page
    assert "| another platform | 1 |" in page and "drawn with seed" not in page
    drawn = torch_tests.page(
        [*results, Result("test_nn.py", "TestNNCUDA.test_1", "passed", "")], "0.0", ("60", "7")
    )
    assert "suites `test_nn.py` up to 60 tests were drawn with seed 7." in drawn


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
    (result,) = torch_tests.run_file(Work(path, "a/test_broken.py"), Options(limit=60))
    assert (
        result[:3] == ("a/test_broken.py", "the file", "not imported")
        and "nothing_of_this_name" in result.text
    )
    table = torch_tests.table([result, Result("a/test_broken.py", "A.b", "passed", "")])
    assert "| 1 | 1 | 1 | 0 | 1 | 1 | 100.0% | 100.0% |" in table, (
        "the row is kept, and a file is no test"
    )


OF_AN_OLDER_RELEASE = """
    import unittest
    import torch.distributed._spmd.gone
    from torch.distributed._tensor.debug import CommDebugMode  # moved
    from torch.testing._internal.common_utils import gone_decorator, gone_list, skipIfMps

    class TestOlder(unittest.TestCase):
        @skipIfMps
        @gone_decorator
        @gone_decorator("with an argument")
        def test_1_uses_what_has_moved(self):
            self.assertEqual(CommDebugMode.__module__, "torch.distributed.tensor.debug._comm_mode")
            self.assertEqual([1] + gone_list, [1])

        def test_2_uses_what_is_gone(self):
            torch.distributed._spmd.gone.function(1)
"""


@pytest.mark.sampled(0)
def test_names_that_torch_has_moved_or_lost(tmp_path: Path) -> None:
    path = tmp_path / "test_older.py"
    path.write_text(textwrap.dedent(OF_AN_OLDER_RELEASE))
    moved, gone = torch_tests.run_file(Work(path, path.name), Options(limit=60))
    assert moved.outcome == "passed", moved.text
    assert (
        gone.outcome == "failed"
        and "_spmd.gone.function is gone" in gone.text
        and gone.cause[0] == "its release's"
    )


OF_RANKS = """
    import os
    import torch
    from torch.testing._internal import common_distributed, common_utils

    imported_in = os.getpid()
    torch.ones(1, device="cuda")  # as decorators do

    class TestRanks(common_distributed.MultiProcessTestCase):
        world_size = 2

        def setUp(self):
            super().setUp()
            self._spawn_processes()

        def test_sum(self):
            assert imported_in != os.getpid(), "the rank did not import this file again"
            torch.distributed.init_process_group(
                "nccl", store=torch.distributed.FileStore(self.file_name, 2), rank=self.rank, world_size=2
            )
            value = torch.ones(1, device=f"cuda:{self.rank}")
            torch.distributed.all_reduce(value)
            assert value.item() == 2

        def test_wrong(self):
            assert self.rank != 1, "the text of rank 1"

    class TestInThisProcess(common_utils.TestCase):
        def test_device(self):
            torch.ones(1, device="cuda").sum().backward
"""


@pytest.mark.sampled(0)
def test_ranks_are_forked_from_a_process_that_has_used_a_device(tmp_path: Path) -> None:
    path = tmp_path / "test_ranks.py"
    path.write_text(textwrap.dedent(OF_RANKS))
    results = {
        each.test: each for each in torch_tests.run_file(Work(path, path.name), Options(limit=60))
    }
    outcomes = {name: each.outcome for name, each in results.items()}
    assert outcomes == {
        "TestRanks.test_sum": "passed",
        "TestRanks.test_wrong": "failed",
        "TestInThisProcess.test_device": "passed",
    }, results
    assert "the text of rank 1" in results["TestRanks.test_wrong"].text


def test_the_files_of_a_suite_and_their_samples(tmp_path: Path) -> None:
    names = ["test_whole.py", "folder/test_a.py", "folder/deep/test_b.py", "folder/not_tests.py"]
    for name in names:
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).touch()
    whole, folder = Suite("test_whole.py", ""), Suite("folder", "any", 4)
    assert [each[1:3] for each in torch_tests.work_of(whole, tmp_path, 9, 0)] == [
        ("test_whole.py", ())
    ]
    works = torch_tests.work_of(folder, tmp_path, 20, 3)
    assert {each.name: each.sample for each in works} == dict.fromkeys(
        names[1:3], ("10", "3", "any")
    )
    assert len(torch_tests.work_of(folder, tmp_path, 4, 3)) == 1, "a small sample leaves files out"
    assert torch_tests.work_of(whole, None, 9, 0) == []
    (of_wheel,) = (each for each in torch_tests.SUITES if each.in_wheel)
    assert len(torch_tests.work_of(of_wheel, None, 9, 0)) == 1


def test_what_changed_since_another_run(
    tmp_path: Path, results: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = tmp_path / "before.json", tmp_path / "now.json"
    turned = {"passed": "failed", "failed": "passed"}
    before.write_text(json.dumps([each._asdict() for each in results]))
    now.write_text(
        json.dumps(
            [
                {**each._asdict(), "outcome": turned.get(each.outcome, each.outcome)}
                for each in results
            ]
        )
    )
    assert torch_tests.main(["--results", str(now), "--against", str(before)]) == 1
    assert (
        "| `test_small.py::TestSmall.test_2_fails` | failed | passed |" in capsys.readouterr().out
    )
    assert torch_tests.main(["--results", str(before), "--against", str(before)]) == 0
    new = [Result("test_new.py", "A.b", "failed", "")]
    assert torch_tests.changes(results, new) == (torch_tests.changes([], [])[0], False), (
        "a new test has not changed"
    )


def test_each_cause_names_whose_it_is() -> None:
    rules = torch_tests.DATA["causes"] + torch_tests.DATA["skips"]
    assert all(
        set(each) == {"cause", "whose", "found by"} and re.compile(each["found by"])
        for each in rules
    )
    assert {each["whose"] for each in torch_tests.DATA["causes"]} <= set(torch_tests.DATA["owners"])


def test_what_was_not_reached_has_failed(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text(
        '{"planned": ["A.b", "A.c"]}\n{"began": "A.b"}\n{"ended": "A.b", "outcome": "passed", '
        '"text": ""}\n'
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
    assert "| `test_small.py` | 1 | 0 | 7 | 1 | 6 | 2 | 33.3% |" in capsys.readouterr().out
    assert torch_tests._known([again]) == results


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "NotSupportedError: torch._C._cuda_getCheckpointState is not",
            "allocator: checkpoints of its state",
        ),
        ("urllib.error.URLError: <urlopen error>", "the test loads something from the network"),
        ("AssertionError: 1 != 2", torch_tests.OTHER),
    ],
)
def test_the_first_rule_that_applies_is_the_cause(text: str, cause: str) -> None:
    assert Result("test_cuda.py", "TestCuda.test_this", "failed", text).cause[1] == cause
