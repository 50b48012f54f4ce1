"""Programs for NCCL with several processes, as torchrun starts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_command

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("backend", ["nccl", "mesh"])  # a mesh begins the group for CPU tensors too
def test_collectives_do_what_nccl_documents(target: str, backend: str) -> None:
    devices = f"{target}:2" if target.startswith("simulated") else target
    done = run_command(
        "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        str(PROGRAMS / "collectives.py"), backend, TORCHDEVICE_TARGET=devices,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("23 cases") == 2, done.stdout


ON_ONE_DEVICE = """
import os, torch, torch.distributed as dist

dist.init_process_group("nccl")
values = torch.ones(2, device="cuda")
if os.environ["APART"] == "visible":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
try:
    dist.all_reduce(values)
    print("sum", values.tolist(), flush=True)
except dist.DistBackendError as error:
    print("refused", str(error).splitlines()[-1], flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("apart", ["no", "visible", "mps"])
def test_two_ranks_on_one_device(tmp_path: Path, apart: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(ON_ONE_DEVICE)
    target = "simulated:mps" if apart == "mps" else "simulated:cuda:2"
    done = run_command(
        "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program),
        TORCHDEVICE_TARGET=target, APART=apart,
    )  # fmt: skip
    refused = {f"Duplicate GPU detected : rank {a} and rank {b} both on CUDA device 1000" for a, b in ((0, 1), (1, 0))}
    expected = {f"refused {line}" for line in refused} if apart == "no" else {"sum [2.0, 2.0]"}
    assert set(done.stdout.splitlines()) == expected, done.stdout + done.stderr[-4000:]
