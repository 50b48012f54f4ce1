"""The pytest plugin, in another project."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from processes import run_command, run_python
from test_options import OTHER_VALUES

from torchdevice.scope import collected_options as record

# Each test starts processes, so the default run takes a sample.
pytestmark = [pytest.mark.sampled(5, of="runs of pytest"), pytest.mark.one_engine]

PROJECT = """
import pytest
import torch

GPU = torch.cuda.is_available()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestGpu:
    def test_there_are_two(self):
        assert torch.cuda.device_count() == 2

    @pytest.mark.parametrize("device", [f"cuda:{i}" for i in range(torch.cuda.device_count())])
    def test_placement(self, device):
        x = torch.ones(2, 2, device=device)
        assert x.is_cuda and x.device == torch.device(device) and (x @ x).device == x.device

    def test_bug(self):
        torch.ones(2, device="cuda") + torch.ones(2)

    def test_child(self):
        import subprocess, sys
        program = "import torch; assert torch.cuda.device_count() == 2 and torch.ones(1).cuda().is_cuda"
        subprocess.run([sys.executable, "-c", program], check=True)


def test_cpu():
    assert torch.ones(1).device.type == "cpu"
"""

FIXTURE = """
import pytest
import torch


def test_one(simulated_accelerator):
    assert torch.ones(1).cuda().is_cuda and torch.cuda.device_count() == 1


@pytest.mark.parametrize("simulated_accelerator", ["cuda:3", "strict:3"], indirect=True)
def test_three(simulated_accelerator):
    assert torch.cuda.device_count() == 3


@pytest.mark.parametrize("simulated_accelerator", ["mps"], indirect=True)
def test_mac(simulated_accelerator):
    assert simulated_accelerator.runtime.target == "simulated:mps"


def test_outside():
    assert not torch.cuda.is_available()
"""


def run_pytest(folder: Path, program: str, *options: str, **environment: str) -> tuple[int, str]:
    (folder / "test_project.py").write_text(program)
    result = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, cwd=folder, **environment
    )
    return result.returncode, result.stdout + result.stderr


def test_gpu_tests_run_and_fail_for_their_bugs(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, PROJECT, "--torchdevice=simulated:cuda:2", "-v")
    assert code == 1 and "1 failed, 5 passed" in output and "skipped" not in output, output
    assert (
        "found at least two devices, cuda:0 and cpu!" in output
        and "torchdevice: simulated:cuda:2" in output
    )


def test_without_the_option_gpu_tests_are_skipped(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, PROJECT, "--torchdevice-memory=8GiB", "-v")
    assert code == 0 and "1 passed" in output and "skipped" in output, output
    assert "only tests with a mark or a fixture take --torchdevice-memory\n" in output, output


def test_on_the_cpu_the_bug_is_not_seen(tmp_path: Path) -> None:
    _, output = run_pytest(tmp_path, PROJECT, "--torchdevice=cpu")
    assert "TestGpu::test_bug" not in output, output


def test_a_wrong_target_is_a_usage_error(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, PROJECT, "--torchdevice=simulated:vax")
    assert code == 4 and "'simulated:vax' is not a target" in output, output


def test_the_fixture(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, FIXTURE)
    assert code == 0 and "5 passed" in output, output


def test_the_fixture_with_the_option(tmp_path: Path) -> None:
    program = (
        "import torch\ndef test(simulated_accelerator): assert torch.cuda.device_count() == 4\n"
    )
    code, output = run_pytest(tmp_path, program, "--torchdevice=simulated:cuda:4")
    assert code == 0 and "1 passed" in output, output


MARKS = """
import pytest
import torch
from torchdevice.scope import activation


@pytest.fixture
def model():
    return torch.nn.Linear(2, 2, device="cuda")


@pytest.mark.torchdevice("cuda:2", memory="8GiB")
def test_devices_and_options():
    assert torch.cuda.device_count() == 2 and torch.cuda.mem_get_info(1)[1] == 8 << 30 and torch.ones(1).cuda().is_cuda


@pytest.mark.torchdevice
def test_bare(model):
    assert torch.cuda.device_count() == 1 and model.weight.is_cuda


@pytest.mark.torchdevice(profile="simulated:mps")
def test_profile_by_name():
    assert activation.current().runtime.target == "simulated:mps"


@pytest.mark.torchdevice(target="cpu", strict=True)
def test_target():
    assert torch.cuda.is_available() and not torch.ones(1).cuda().is_cuda and activation.current().options.strict


@pytest.mark.skipif("not torch.cuda.is_available()")
@pytest.mark.torchdevice
def test_condition_as_text(): ...


@pytest.mark.torchdevice("cuda:2")
class TestClass:
    def test_of_the_class(self, model):
        assert model.weight.is_cuda and torch.cuda.device_count() == 2

    @pytest.mark.torchdevice("cuda:3")
    def test_the_nearest_counts(self, simulated_accelerator, torchdevice_scope):
        assert torch.cuda.device_count() == 3 and torchdevice_scope is simulated_accelerator

    @pytest.mark.xfail(strict=True)
    def test_failure(self):
        raise ValueError


def test_outside():
    assert not torch.cuda.is_available() and activation.current() is None


def test_scope(torchdevice_scope):
    torch.ones(1, device="cuda")
    assert torchdevice_scope is activation.current() and torchdevice_scope.journal.entries
"""


def test_marks(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, MARKS, "--strict-markers")
    assert code == 0 and "9 passed, 1 xfailed" in output, output


def test_a_mark_inside_the_scope_of_the_option(tmp_path: Path) -> None:
    program = """
import pytest, torch
@pytest.mark.torchdevice("cuda:3")
def test_mark(): assert torch.cuda.device_count() == 3 and torch.cuda.mem_get_info()[1] == 1 << 30
def test_option(torchdevice_scope):
    assert torch.cuda.device_count() == 2 and torchdevice_scope.options.memory == 1 << 30
"""
    code, output = run_pytest(
        tmp_path, program, "--torchdevice=simulated:cuda:2", "--torchdevice-memory=1GiB"
    )
    assert code == 0 and "2 passed" in output, output


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('"vax"', "'simulated:vax' is not a target"),
        ('"cuda", target="cpu"', "names 2 devices: ['cuda', 'cpu']. Give one profile"),
        ('"cuda", memroy=1', "'memroy' is not an option"),
        ('"cuda", memory="much"', "memory='much' is not a size"),
    ],
)
def test_a_wrong_mark_is_an_error_of_its_test(mark: str, message: str, tmp_path: Path) -> None:
    program = (
        f"import pytest\n@pytest.mark.torchdevice({mark})\ndef test(): ...\ndef test_other(): ...\n"
    )
    code, output = run_pytest(tmp_path, program)
    assert (
        code == 1
        and "1 passed, 1 error" in output
        and f"torchdevice: {message}" in output.replace("pytest.mark.torchdevice ", "")
    ), output
    assert "Traceback" not in output and "hookexec" not in output


INTERRUPTED = """
import pytest, torch
@pytest.mark.torchdevice
def test():
    raise KeyboardInterrupt
"""


def test_an_interrupted_test_leaves_its_scope(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, INTERRUPTED, "--torchdevice=cpu")
    assert code == 2 and "ScopeError" not in output and "KeyboardInterrupt" in output, output


SHOWN = """
import json, torchdevice
from torchdevice.scope import collected_options as record
def test():
    options = torchdevice.current().options
    values = {name: record.declarations()[name].show(getattr(options, name)) for name in record.declarations()}
    print("OPTIONS", json.dumps(values))
"""


def shown(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if "OPTIONS" in line)
    return json.loads(line.partition("OPTIONS ")[2])


def as_text(values: dict[str, Any]) -> dict[str, str]:
    return {
        name: record.declarations()[name].show(getattr(record.Options(**values), name))
        for name in values
    }


# "devices" contradicts the number in a target's name, "verify" contradicts "asynchronous" and
# "compute", and no engine but the suite's may be used here.
GIVEN = {**OTHER_VALUES, "target": "simulated:mps"}


def test_every_option_is_a_flag(tmp_path: Path) -> None:
    given = as_text(
        {
            name: value
            for name, value in GIVEN.items()
            if name not in ("devices", "asynchronous", "compute", "values")
        }
    )
    words = [
        record.pytest_flag_of(name) + ("" if type(GIVEN[name]) is bool else f"={text}")
        for name, text in given.items()
    ]
    code, output = run_pytest(tmp_path, SHOWN, "-s", *words)
    assert code == 0 and given.items() <= shown(output).items(), output


def test_every_option_is_a_key(tmp_path: Path) -> None:
    given = as_text(
        {name: value for name, value in GIVEN.items() if name not in ("devices", "verify")}
    )
    lines = [f"{record.pytest_key_of(name)} = {text}" for name, text in given.items()]
    (tmp_path / "pytest.ini").write_text("\n".join(["[pytest]", *lines]))
    code, output = run_pytest(tmp_path, SHOWN, "-s", TORCHDEVICE_ENGINE="")
    assert code == 0 and given.items() <= shown(output).items(), output


class TestFile:
    """A configuration file says what neither the command line nor a variable says."""

    @pytest.fixture(autouse=True)
    def project(self, tmp_path: Path) -> None:
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\ntorchdevice = simulated:cuda:2\ntorchdevice_memory = 1GiB\n"
        )

    def test_its_target(self, tmp_path: Path) -> None:
        code, output = run_pytest(tmp_path, SHOWN, "-s")
        assert code == 0 and shown(output)["target"] == "simulated:cuda:2", output
        assert shown(output)["identity"] == "program" and shown(output)["memory"] == str(1 << 30)

    def test_a_flag_comes_first(self, tmp_path: Path) -> None:
        """The memory of the file contradicts this target, and is left out."""
        code, output = run_pytest(tmp_path, SHOWN, "-s", "--torchdevice=cpu")
        assert code == 0 and shown(output)["target"] == "cpu", output

    def test_a_variable_comes_first(self, tmp_path: Path) -> None:
        code, output = run_pytest(
            tmp_path, SHOWN, "-s", TORCHDEVICE_MEMORY="2GiB", TORCHDEVICE_TARGET="simulated:mps"
        )
        assert code == 0 and shown(output)["target"] == "simulated:mps", output
        assert shown(output)["memory"] == str(2 << 30)

    def test_it_can_be_set_aside(self, tmp_path: Path) -> None:
        program = "import torch\ndef test(): assert not torch.cuda.is_available()\n"
        code, output = run_pytest(tmp_path, program, "-o", "torchdevice=")
        assert code == 0, output

    def test_a_wrong_value_is_a_usage_error(self, tmp_path: Path) -> None:
        (tmp_path / "pytest.ini").write_text("[pytest]\ntorchdevice_memory = much\n")
        code, output = run_pytest(tmp_path, SHOWN)
        assert code == 4 and "torchdevice_memory='much': memory='much' is not a size" in output, (
            output
        )

    def test_run_says_where(self, tmp_path: Path) -> None:
        (tmp_path / "test_project.py").write_text(SHOWN)
        result = run_command(
            "run", "--target=simulated:strict", "-m", "pytest", "-sq", cwd=tmp_path
        )
        assert shown(result.stdout)["target"] == "simulated:strict", result.stdout + result.stderr


WORKERS = """
import os
import pytest, torch
from torchdevice.kernel import thread_state


@pytest.mark.parametrize("number", range(4))
def test(number):
    assert torch.cuda.device_count() == 2 and torch.ones(1, device="cuda:1").is_cuda
    assert len(thread_state.state.entries) == 1 and os.environ["PYTEST_XDIST_WORKER"].startswith("gw")
"""


@pytest.mark.parametrize("way", ["flag", "file", "run"])
def test_workers_of_xdist(way: str, tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="install with the [test] extra")
    (tmp_path / "test_project.py").write_text(WORKERS)
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    if way == "file":
        (tmp_path / "pytest.ini").write_text("[pytest]\ntorchdevice = simulated:cuda:2\n")
    if way == "run":
        result = run_command("run", "--target=simulated:cuda:2", *words, cwd=tmp_path)
    else:
        result = run_python(
            *words, *(["--torchdevice=simulated:cuda:2"] if way == "flag" else []), cwd=tmp_path
        )
    assert result.returncode == 0 and "4 passed" in result.stdout, result.stdout + result.stderr


UNITTEST = """
import unittest
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TEST_CUDA, TestCase


class Plain(unittest.TestCase):
    def test_identity(self):
        self.assertTrue(torch.ones(1).cuda().is_cuda)


class Own(TestCase):
    def test_cuda(self):
        self.assertTrue(TEST_CUDA and torch.ones(1).cuda().is_cuda)


class WithoutSuper(TestCase):
    def setUp(self):
        pass

    def test_once(self):
        self.assertTrue(torch.ones(1).cuda().is_cuda)

    test_twice = test_once


class EntersOneMore(TestCase):
    def setUp(self):
        super().setUp()
        import torchdevice

        scope = torchdevice.simulate(count=2)
        scope.__enter__()
        self.addCleanup(scope.__exit__, None, None, None)

    def test_count(self):
        self.assertEqual(torch.cuda.device_count(), 2)


class Of(TestCase):
    def test_device(self, device):
        self.assertEqual(torch.ones(2, device=device).device.type, torch.device(device).type)


instantiate_device_type_tests(Of, globals())
"""

LEAKING = """
from torch.overrides import BaseTorchFunctionMode
from torch.testing._internal.common_utils import TestCase


class Leaking(TestCase):
    def test(self):
        BaseTorchFunctionMode().__enter__()


class LeakingWithoutSuper(TestCase):
    def setUp(self):
        pass

    test = Leaking.test
"""


@pytest.mark.parametrize("runner", ["unittest", "pytest"])
def test_tests_of_unittest_and_of_torch(runner: str, tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(UNITTEST)
    result = run_command(
        "run", "--target=simulated:cuda", "-m", runner, "-v", "test_project.py", cwd=tmp_path
    )
    said = result.stdout + result.stderr
    ended = "Ran 7 tests" if runner == "unittest" else "7 passed"
    assert result.returncode == 0 and ended in said and "skip" not in said, said
    assert "OfCPU" in said and "OfCUDA" in said and "PRIVATEUSE1" not in said


def test_torchs_test_case_still_finds_what_a_test_leaves(tmp_path: Path) -> None:
    (tmp_path / "test_project.py").write_text(LEAKING)
    inside = run_command(
        "run", "--target=simulated:cuda", "-m", "unittest", "test_project.py", cwd=tmp_path
    )
    outside = run_python("-m", "unittest", "test_project.py", cwd=tmp_path)
    assert ("torch function mode stack was leaked" in inside.stderr) == (
        "was leaked" in outside.stderr
    )
    assert inside.stderr.splitlines()[-1] == outside.stderr.splitlines()[-1]


REPORTED = """
import pytest
import torch


@pytest.mark.parametrize("number", range(4))
def test_it(number):
    torch.ones(2).cuda()
    with torch.autocast("cuda", torch.float16):
        torch.ones(2) * 2
"""


class TestSummary:
    def test_totals(self, tmp_path: Path) -> None:
        code, output = run_pytest(tmp_path, REPORTED, "--torchdevice=cpu", "-v")
        assert code == 0 and "changed numbers: 4 calls at 1 line\n" in output, output
        assert (
            "ran elsewhere: 4 calls at 1 line\n" in output
            and "autocast(torch.float16)" not in output
        )

    def test_nothing_is_said_without_a_scope_or_a_call(self, tmp_path: Path) -> None:
        for flags in ((), ("--torchdevice=cpu",)):
            _, output = run_pytest(tmp_path, "def test_it():\n    pass\n", "-v", *flags)
            assert "1 passed" in output and "- torchdevice -" not in output.replace("=", "-"), (
                output
            )

    def test_the_report(self, tmp_path: Path) -> None:
        code, output = run_pytest(tmp_path, REPORTED, "--torchdevice=cpu", "--torchdevice-report")
        assert code == 0 and output.count("torchdevice: report of ") == 1, output
        assert "4 x autocast(torch.float16) ->" in output and "torch.ones(2).cuda()" in output, (
            output
        )

    def test_files(self, tmp_path: Path) -> None:
        run_pytest(
            tmp_path, REPORTED, "--torchdevice=cpu", "-n", "2", "--torchdevice-report=found.json"
        )
        report = json.loads((tmp_path / "found.json").read_text())
        assert {process["name"] for process in report["processes"]} == {"main", "gw0", "gw1"}
        assert sum(row["count"] for row in report["rows"]) == 8
        code, output = run_pytest(
            tmp_path, REPORTED, "--torchdevice=cpu", "--torchdevice-report=found.txt"
        )
        assert code == 4 and "'found.txt' is neither FILE.html nor FILE.json" in output, output


POISONED = """
import torch


def test_out_of_range():
    torch.nn.functional.embedding(torch.tensor([7]).cuda(), torch.ones(4, 1).cuda())


def test_after_it():
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_wrong_device():
    torch.ones(2, device="cuda") + torch.ones(2)
"""


@pytest.mark.parametrize("isolation", ["test", "session"])
def test_a_failed_device_and_frames_of_errors(isolation: str, tmp_path: Path) -> None:
    flag = f"torchdevice_isolation={isolation}"
    _, output = run_pytest(tmp_path, POISONED, "--torchdevice=simulated:cuda", "-o", flag)
    if isolation == "test":
        assert "2 failed, 1 passed" in output and "cuda:0 and cpu!" in output
    else:
        assert "3 failed" in output
        assert output.count("An earlier call failed at ") >= 2
        assert "test_project.py:6 in test_out_of_range, and CUDA runs nothing after that." in output
    assert (
        f"torchdevice{os.sep}simulation" not in output
        and f"torchdevice{os.sep}engines" not in output
    )
