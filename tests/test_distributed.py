"""Programs for NCCL with several processes, as torchrun starts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_command

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["nccl", "mesh"])  # a mesh begins the group for CPU tensors too
def test_collectives_do_what_nccl_documents(target: str, backend: str) -> None:
    devices = f"{target}:2" if target.startswith("simulated") else target
    done = run_command(
        "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(PROGRAMS / "collectives.py"), backend, TORCHDEVICE_TARGET=devices,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("22 cases") == 2, done.stdout
