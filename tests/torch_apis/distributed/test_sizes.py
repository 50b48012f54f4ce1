"""Collectives of empty tensors, one element, numbers, and parts that differ by rank."""

from __future__ import annotations

import pytest
from places import PROGRAMS
from processes import run_command

pytestmark = pytest.mark.one_engine


@pytest.mark.parametrize(
    ("target", "backend"),
    [("simulated:cuda:3", "nccl"), ("simulated:cuda:3", "gloo"), ("cpu", "nccl")],
)
def test_every_collective_of_every_size(target: str, backend: str) -> None:
    program = str(PROGRAMS / "collective_sizes.py")
    done = run_command(
        "run", "--ranks", "3", program, backend, TORCHDEVICE_TARGET=target, TORCHDEVICE_DEVICES=""
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is done") == 3
