"""Two steps of training, divided by tensors or in a pipeline. Rank 0 prints its memory at the
peak.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _tensors(block: nn.Sequential) -> Callable[[], None]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return lambda: block(torch.randn(64, 512, device="cuda")).sum().backward()


def _pipeline(block: nn.Sequential) -> Callable[[], None]:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = PipelineStage(block, rank, last + 1, torch.device("cuda", torch.cuda.current_device()))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)

    def step() -> None:
        numbers = torch.randn(64, 512, device="cuda")
        schedule.step(
            *([numbers] if rank == 0 else []), **({"target": numbers} if rank == last else {})
        )

    return step


def _train(kind: str) -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    block = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
    step = {"tensors": _tensors, "pipeline": _pipeline}[kind](block)
    optimizer = torch.optim.AdamW(block.parameters())
    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("peak", torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())


if __name__ == "__main__":
    _train(sys.argv[1])
