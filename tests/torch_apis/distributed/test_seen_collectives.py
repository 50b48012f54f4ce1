"""Dispatch modes and the profiler see an NCCL group's collectives as gloo's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import PROGRAMS
from processes import run_command, run_torch_python

pytestmark = pytest.mark.one_engine

PROGRAM = str(PROGRAMS / "seen_collectives.py")


@pytest.fixture(scope="module")
def gloos(tmp_path_factory: pytest.TempPathFactory) -> object:
    """What plain torch shows of gloo on the CPU."""
    path = tmp_path_factory.mktemp("gloo") / "seen.json"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run = run_torch_python(*launcher, PROGRAM, str(path), "gloo")
    assert run.returncode == 0, run.stderr
    return json.loads(path.read_text())


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.parametrize("engine", ["auto", "mode"])
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_modes_see_what_they_see_of_gloo(
    target: str, engine: str, gloos: object, tmp_path: Path
) -> None:
    path = tmp_path / "seen.json"
    run = run_command(
        "run", "--target", target, "--engine", engine, "--ranks", "2", PROGRAM, str(path), "nccl"
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(path.read_text()) == gloos
