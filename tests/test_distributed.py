"""Programs for NCCL with several processes, as torchrun starts them."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import run_command

PROGRAMS = Path(__file__).parent / "programs"


def torchrun(target: str, program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in two processes, on a target with two devices where the target is simulated."""
    devices = f"{target}:2" if target.startswith("simulated") else target
    return run_command(
        "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program), *arguments,
        TORCHDEVICE_TARGET=devices, **environment,
    )  # fmt: skip


def assert_succeeded(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["nccl", "mesh"])  # a mesh begins the group for CPU tensors too
def test_collectives_do_what_nccl_documents(target: str, backend: str) -> None:
    done = torchrun(target, PROGRAMS / "collectives.py", backend)
    assert_succeeded(done)
    assert done.stdout.count("23 cases") == 2, done.stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["test_ops", "test_script", "test_sync", "test_ddp_comm_hook", "test_distributed_data_loop"]
)
def test_accelerates_own_tests(target: str, name: str) -> None:
    if name == "test_distributed_data_loop":
        pytest.importorskip("torchdata", reason="install with the [test] extra")
    (accelerate,) = find_spec("accelerate").submodule_search_locations  # type: ignore[union-attr]
    script = Path(accelerate, "test_utils", "scripts", f"{name}.py")
    assert_succeeded(torchrun(target, script, ACCELERATE_DEBUG_MODE="1"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "cases",
    [
        ["data_parallel", "data_parallel_with_unused_parameters", "zero"],
        ["sharded", "sharded_state"],
        ["fully_sharded", "fully_sharded_from_meta", "checkpoints"],
        ["tensor_parallel", "pipeline"],
    ],
    ids=", ".join,
)
def test_a_model_trained_in_parallel_has_the_losses_of_one_process(target: str, cases: list[str]) -> None:
    assert_done(torchrun(target, PROGRAMS / "parallel_models.py", *cases), cases)


@pytest.mark.sampled(1)
def test_batch_norm_is_synchronized(kind: str, target: str) -> None:
    cases = ["synchronized_batch_norm"]
    done = torchrun(target, PROGRAMS / "parallel_models.py", *cases)
    if kind == "cpu":  # torch's own answer
        assert "SyncBatchNorm layers only work with GPU modules" in done.stderr
    else:
        assert_done(done, cases)


def assert_done(done: subprocess.CompletedProcess[str], cases: list[str]) -> None:
    assert_succeeded(done)
    assert all(f"rank {rank}: {case} done" in done.stdout for rank in (0, 1) for case in cases), done.stdout


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


@pytest.mark.sampled(1)
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
