"""Collectives that go on while the program computes, compared with plain gloo's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import PROGRAMS
from processes import run_command


@pytest.mark.sampled(3, of="programs of two ranks")
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_collective_ends_when_the_last_rank_has_come(target: str, tmp_path: Path) -> None:
    run = run_command(
        "run", "--target", target, "--ranks", "2", str(PROGRAMS / "late_rank.py"), str(tmp_path)
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        ours, gloos, others = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(ours) == 10 and all(is_completed for _, is_completed, _ in ours.values())
        # gloo itself does not always say of its reduce-scatter that it has ended.
        early, gloos_early = (
            {name: (each[0], each[2]) for name, each in found.items()} for found in (ours, gloos)
        )
        assert early == gloos_early
        assert rank or not any(was_completed for was_completed, _ in early.values())
        assert others == [
            [2.0] * 3,
            [5.0 if rank == 0 else 1.0] * 3,
            [[2.0] * 3] * 2,
            [True, True],
            [8.0] * 3,
        ]


UNWAITED = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
if dist.get_rank() == int(sys.argv[1]):
    dist.all_reduce(x, async_op=True)
else:
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.sampled(3, of="programs of two ranks")
# The other rank ends before, or while, or after this one ends.
@pytest.mark.parametrize("seconds", ["0", "2.5"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_ends_with_a_collective_that_never_ended(
    rank: str, seconds: str, target: str, tmp_path: Path
) -> None:
    (tmp_path / "ranks.py").write_text(UNWAITED)
    run = run_command(
        "run", "--target", target, "--ranks", "2", "ranks.py", rank, seconds, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr


FORGOTTEN = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
for _ in range(9):
    dist.all_reduce(torch.ones(1 << 20, device="cuda"), async_op=True)
dist.barrier()
dist.all_reduce(torch.ones(4, device="cuda"), async_op=True).wait()
print(torch.cuda.memory_allocated() < 1 << 20)
"""


@pytest.mark.sampled(1, of="programs of two ranks")
def test_collectives_that_nobody_waits_for_hold_no_memory_once_they_have_ended(
    tmp_path: Path,
) -> None:
    (tmp_path / "ranks.py").write_text(FORGOTTEN)
    run = run_command("run", "--target", "simulated:cuda", "--ranks", "2", "ranks.py", cwd=tmp_path)
    assert run.stdout.replace("\n", "") == "TrueTrue", run.stderr  # two processes write


IN_CPP = """
import torch, torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch._C._distributed_c10d import _get_work_registry_size as size
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
one, other = (torch.ones(4, device="cuda") for _ in range(2))
with functional.allow_inflight_collective_as_graph_input_ctx():
    dist.all_reduce(one, async_op=True)  # only torch's C++ keeps the work
    sizes = [size(), functional.wait_tensor(one) is one, size()]
    work = dist.all_reduce(other, async_op=True)
    sizes += [size(), work.wait(), size()]
assert sizes == [1, True, 0, 1, True, 0], sizes
assert one.tolist() == other.tolist() == [2.0] * 4
"""


@pytest.mark.sampled(3, of="programs of two ranks")
@pytest.mark.timeout(120)
def test_torch_waits_for_work_that_the_program_has_dropped(target: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(IN_CPP)
    run = run_command("run", "--target", target, "--ranks", "2", "ranks.py", cwd=tmp_path)
    assert run.returncode == 0, run.stderr


ABORTED = """
import datetime, sys, torch, torch.distributed as dist
dist.init_process_group("nccl")
store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
if dist.get_rank():
    for call in (lambda: dist.all_reduce(x, async_op=True).wait(datetime.timedelta(seconds=1)), lambda: dist.barrier()):
        try:
            call()
        except dist.DistBackendError as error:
            print(error)
    store.set("seen", "")
    store.wait(["joined"])
else:
    store.wait(["seen"])
    dist.all_reduce(x)  # what the other rank has given up ends all the same, so that both end in order
    store.set("joined", "")
"""


@pytest.mark.sampled(3, of="programs of two ranks")
def test_a_group_is_not_used_again_after_a_wait_was_given_up(target: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(ABORTED)
    run = run_command("run", "--target", target, "--ranks", "2", "ranks.py", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    first = "Watchdog caught collective operation timeout: all_reduce"
    again = f"NCCL communicator was aborted on rank 1. Original reason for failure was: {first}"
    assert run.stdout.splitlines() == [first, again]
