"""The pytest plugin, in another project."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_python

pytestmark = pytest.mark.one_engine

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
    assert simulated_accelerator.runtime.target == "simulated:mps:1"


def test_outside():
    assert not torch.cuda.is_available()
"""


def run_pytest(folder: Path, program: str, *options: str) -> tuple[int, str]:
    (folder / "test_project.py").write_text(program)
    result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, cwd=folder)
    return result.returncode, result.stdout + result.stderr


def test_gpu_tests_run_and_fail_for_their_bugs(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, PROJECT, "--torchdevice=simulated:cuda:2", "-v")
    assert code == 1 and "1 failed, 5 passed" in output and "skipped" not in output, output
    assert "found at least two devices, cuda:0 and cpu!" in output and "torchdevice: simulated:cuda:2" in output


def test_without_the_option_gpu_tests_are_skipped(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, PROJECT)
    assert code == 0 and "1 passed" in output and "skipped" in output, output


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
    program = "import torch\ndef test(simulated_accelerator): assert torch.cuda.device_count() == 4\n"
    code, output = run_pytest(tmp_path, program, "--torchdevice=simulated:cuda:4")
    assert code == 0 and "1 passed" in output, output
