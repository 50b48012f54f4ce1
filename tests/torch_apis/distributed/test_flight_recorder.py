"""NCCL's flight recorder and the names of its events, read by torch's own analyser and profiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import PROGRAMS
from processes import run_command

import torchdevice

pytestmark = pytest.mark.one_engine

PROGRAM = str(PROGRAMS / "recorded_collectives.py")


def run_ranks(
    target: str, case: str, folder: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    options = ["--target", target, "--ranks", "2"]
    return run_command(
        "run", *options, PROGRAM, case, TORCH_FR_DUMP_TEMP_FILE=f"{folder}/trace_", **environ
    )


@pytest.mark.sampled(2, of="programs of two ranks")
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_the_record_of_a_program(target: str, tmp_path: Path) -> None:
    """The program compares what is recorded, and the names in a profile, with NCCL's."""
    run = run_ranks(target, "compared", tmp_path, TORCH_FR_BUFFER_SIZE="10")
    assert run.returncode == 0 and run.stdout.count("as NCCL") == 2, run.stderr
    assert not list(tmp_path.iterdir()), "nothing is written as long as the ranks go on"


def test_a_pipe_asks_a_rank_for_its_record(tmp_path: Path) -> None:
    pipes = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/"}
    run = run_ranks("simulated:cuda", "piped", tmp_path, TORCH_FR_BUFFER_SIZE="10", **pipes)
    assert run.returncode == 0 and run.stdout.count("as NCCL") == 2, run.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["trace_1"], "the pipes go with the group"


@pytest.mark.parametrize(
    ("variable", "case"),
    [
        ("TORCH_FR_BUFFER_SIZE", "differing"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "differing_while_the_program_goes_on"),
    ],
)
def test_torchs_analyser_finds_ranks_that_differ(variable: str, case: str, tmp_path: Path) -> None:
    run = run_ranks("simulated:cuda", case, tmp_path, **{variable: "10"})
    assert run.returncode != 0 and "do not fit together" in run.stderr, run.stderr
    assert "torch.cuda.nccl" not in run.stderr, "the program asks for no version"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.flight_recorder.fr_trace",
        str(tmp_path),
        "-p",
        "trace_",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        "Expected collective type: 'all_reduce' does not match found collective type: 'broadcast'"
        in found.stderr
    )
    assert PROGRAM in found.stderr, "where the program called it"


def test_nothing_is_recorded_by_default(tmp_path: Path) -> None:
    assert run_ranks("simulated:cuda", "differing", tmp_path).returncode != 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["_dump_nccl_trace", "_dump_nccl_trace_json"])
def test_the_names_go_with_the_scope(name: str) -> None:
    in_c: Any = torch._C._distributed_c10d
    before = getattr(in_c, name, None)
    with torchdevice.portable(target="cpu"):
        assert getattr(in_c, name)(includeCollectives=False)
    assert getattr(in_c, name, None) is before
