"""Two torchrun agents of two ranks, as on two hosts, meeting on this machine's loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_port

pytestmark = pytest.mark.one_engine

PROGRAM = """
import os, socket, sys

# Two agents on one machine have one name, so each gets the name of its host here.
socket.gethostname = lambda: "node" + os.environ["GROUP_RANK"]

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
numbers = torch.full((2,), dist.get_rank() + 1.0, device="cuda")
dist.all_reduce(numbers)
at = torch.cuda.current_device()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {at}: {numbers.tolist()}\\n", end="")
if sys.argv[1] == "ends" and dist.get_rank() == 3:
    sys.exit(3)
dist.all_reduce(numbers[: 1 if sys.argv[1] == "differ" and dist.get_rank() == 3 else 2])
dist.destroy_process_group()
"""


def _run(target: list[str], case: str, folder: Path) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of each agent."""
    (folder / "ranks.py").write_text(PROGRAM)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
    ]
    launcher.append(f"--master-port={free_port()}")
    command = [sys.executable, "-m", "torchdevice", "run", *target, *launcher]
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={node}", "ranks.py", case],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [agent.communicate(timeout=300) for agent in agents]
    return [(agent.returncode, *each) for agent, each in zip(agents, said, strict=True)]


@pytest.mark.sampled(1, of="two hosts")
@pytest.mark.parametrize(
    "target",
    [["--target", "cpu", "--devices", "2"], ["--target", "simulated:cuda:2"]],
    ids=["cpu", "simulated"],
)
def test_ranks_of_two_hosts_use_the_devices_of_their_host(
    target: list[str], tmp_path: Path
) -> None:
    for node, (code, output, errors) in enumerate(_run(target, "all", tmp_path)):
        assert code == 0, errors
        ranks = [f"rank {2 * node + local} of 4 on {local}: [10.0, 10.0]" for local in range(2)]
        assert sorted(line for line in output.splitlines() if line.startswith("rank ")) == ranks


@pytest.mark.sampled(1, of="two hosts")
def test_an_error_says_on_which_host_the_rank_was(tmp_path: Path) -> None:
    first, second = _run(["--target", "simulated:cuda:2"], "ends", tmp_path)
    assert (first[0], second[0]) == (1, 1)
    assert "4 ranks cannot end: rank 3 on node1 ended at ranks.py:17 with exit code 3." in first[2]


@pytest.mark.sampled(1, of="two hosts")
def test_a_mismatch_says_the_host_of_each_rank(tmp_path: Path) -> None:
    (_, _, errors), _ = _run(["--target", "simulated:cuda:2"], "differ", tmp_path)
    for rank, size in enumerate((2, 2, 2, 1)):
        call = (
            f"all_reduce of float32[{size}], SUM, at {tmp_path / 'ranks.py'}:18 in <module> on "
            f"node{rank // 2}"
        )
        assert f"rank {rank} of the group calls {call}" in errors, errors
