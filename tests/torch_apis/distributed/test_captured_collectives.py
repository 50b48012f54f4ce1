"""Collectives in CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from places import PROGRAMS
from processes import run_command

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.mark.sampled(2, of="programs of two ranks")
@pytest.mark.parametrize("engine", ["auto", "mode"])
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_replay_runs_collectives_again(target: str, engine: str, tmp_path: Path) -> None:
    path = tmp_path / "found"
    run = run_command(
        *("run", "--target", target, "--engine", engine, "--ranks", "2"),
        *(str(PROGRAMS / "captured_collectives.py"), str(path)),
    )
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        found = json.loads(path.with_suffix(f".{rank}").read_text())
        assert len(found) == 11
        for name, (replayed, called) in found.items():
            assert replayed == called, name


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_replay_after_the_end_of_the_group(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_backend", dist.distributed_c10d._backend)
    with torchdevice.portable(target):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))
        assert x.tolist() == [1.0] * 3
        graph.replay()
        assert x.tolist() == [2.0] * 3
        dist.destroy_process_group()
        with pytest.raises(dist.DistBackendError, match="NCCL communicator was aborted on rank 0"):
            graph.replay()
