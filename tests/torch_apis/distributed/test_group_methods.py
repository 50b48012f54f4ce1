"""What a program asks of a process group for NCCL beside the functions of ``torch.distributed``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from places import PROGRAMS
from processes import run_command
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchdevice


@pytest.mark.sampled(3, of="programs of two ranks")
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_group_takes_every_form_of_its_methods(target: str, tmp_path: Path) -> None:
    run = run_command(
        "run", "--target", target, "--ranks", "2", str(PROGRAMS / "group_methods.py"), str(tmp_path)
    )
    assert run.returncode == 0, run.stderr
    assert "Time stats" not in run.stderr, "DDP's warning of devices without a timer"
    for rank in range(2):
        ours, gloos, others, shared, observed = json.loads((tmp_path / f"{rank}.json").read_text())
        assert ours == gloos
        assert not [form for form, outcome in gloos.items() if isinstance(outcome, str)], (
            "gloo refuses a form"
        )
        assert others == {
            "split": [[2.0, 2.0], 2, "nccl"],
            "hooks": [[1.5, 1.5]] * 3,
            "late": True,
            "made": [2.0, 2.0],
            "configuration": "cuda:nccl",
            "time-out in minutes": 10.0,
        }
        assert shared == [2.0, 2.0]
        assert observed == {
            "hook": [["ALLREDUCE", 1, True], ["ALLGATHER", 2, True]],
            "sequence": 2,
            "NaN": "NaN found in input tensor.",
            "variables": [
                error
                for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_NAN_CHECK")
                for error in [f"Invalid value for environment variable: {name}"] * 2 + [""]
            ],
            **({"late": True} if rank == 0 else {}),
        }


@pytest.mark.parametrize("store", [FakeStore, lambda: None])
def test_a_fake_group_plans_for_ranks_that_do_not_exist(
    store: Callable[[], Any], cuda: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch keeps the name of the last group's backend after the group has ended.
    monkeypatch.setattr(dist.distributed_c10d, "_backend", dist.distributed_c10d._backend)
    dist.init_process_group("fake", rank=0, world_size=4, store=store())
    try:
        mesh = dist.device_mesh.init_device_mesh("cuda", (4,))
        model = torch.nn.Linear(8, 8).cuda()
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        assert [tuple(each.grad.to_local().shape) for each in model.parameters()] == [(2, 8), (2,)]
        dist.all_reduce(torch.ones(4, device="cuda"))
        dist.barrier(device_ids=[0])
        assert (dist.get_backend(), dist.get_world_size()) == ("fake", 4)
    finally:
        dist.destroy_process_group()
