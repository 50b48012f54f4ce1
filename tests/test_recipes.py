"""The recipes of docs/using.md, as they stand there, in another project."""

from __future__ import annotations

import os
import re
import sys
import venv
from pathlib import Path

import pytest
from places import ROOT
from processes import run_python

PAGE = ROOT / "docs" / "using.md"

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

TEST = """
import torch


def test_two_devices():
    assert torch.cuda.device_count() == 2 and torch.ones(1, device="cuda:1").is_cuda
"""

# Each test starts processes, so the default run takes a sample.
pytestmark = [pytest.mark.sampled(2, of="recipes"), pytest.mark.one_engine]


def block(language: str, word: str) -> str:
    """Return the code block of the page in a language with a word in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (found,) = (text for text in blocks if word in text)
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_project.py").write_text(TEST)
    return tmp_path


def folders() -> str:
    """Return where this Python finds the package and its dependencies."""
    return os.pathsep.join([str(PAGE.parent.parent), *filter(None, sys.path)])


def test_tests_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "test_page.py").write_text(block("python", "test_two_devices"))
    result = run_python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", cwd=tmp_path
    )
    assert result.returncode == 0 and "4 passed" in result.stdout, result.stdout


def test_configuration_of_the_page(project: Path) -> None:
    (project / "pytest.ini").write_text(block("ini", "torchdevice_memory"))
    result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout


@pytest.mark.sampled(8, of="long programs")
def test_github_actions(project: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="install with the [test] extra")
    pytest.importorskip("xdist", reason="install with the [test] extra")
    (job,) = yaml.safe_load(block("yaml", "runs-on"))["jobs"].values()
    torch_first, the_rest, run = (step["run"] for step in job["steps"] if "run" in step)
    assert torch_first.split() == ["pip", "install", "torch", "--index-url", CPU_INDEX]
    assert the_rest.split()[:3] == ["pip", "install", "torchdevice-portable"]
    words = run.split()
    result = run_python("-m", *words, cwd=project)
    assert words[0] == "pytest" and result.returncode == 0 and "1 passed" in result.stdout, (
        result.stdout
    )


def test_nox(project: Path) -> None:
    """The session runs; what it installs was put in its environment before."""
    pytest.importorskip("nox", reason="install with the [test] extra")
    (project / "noxfile.py").write_text(block("python", "nox.session"))
    environment = project / ".nox" / "simulated_cuda"
    venv.create(environment, symlinks=os.name != "nt")
    (packages,) = environment.rglob("site-packages")
    (packages / "here.pth").write_text("\n".join(folders().split(os.pathsep)))
    result = run_python("-m", "nox", "-R", "--", "-p", "no:cacheprovider", cwd=project)
    assert result.returncode == 0 and "1 passed" in result.stdout + result.stderr, (
        result.stdout + result.stderr
    )


def test_tox(project: Path) -> None:
    """The environment's command runs; what it would install is found by a variable."""
    pytest.importorskip("tox", reason="install with the [test] extra")
    (project / "tox.ini").write_text(block("ini", "testenv"))
    (project / "pyproject.toml").write_text('[project]\nname = "project"\nversion = "1"\n')
    words = ["run", "--skip-env-install", "--skip-pkg-install", "-x"]
    override = f"testenv:simulated-cuda.set_env+=PYTHONPATH={folders()}"
    result = run_python("-m", "tox", *words, override, cwd=project)
    assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout + result.stderr
