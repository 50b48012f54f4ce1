"""Two steps of training by several ranks. Each rank prints its memory at the peak."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def _run(model: nn.Module) -> None:
    model(torch.randn(64, 512, device="cuda")).sum().backward()


def _tensors(block: nn.Sequential) -> Callable[[], None]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return lambda: _run(block)


def _data(block: nn.Sequential) -> Callable[[], None]:
    parallel = nn.parallel.DistributedDataParallel(block, [torch.cuda.current_device()])
    return lambda: _run(parallel)


def _halved(block: nn.Sequential) -> Callable[[], None]:
    parallel = nn.parallel.DistributedDataParallel(block, [torch.cuda.current_device()])
    parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return lambda: _run(parallel)


def _of_low_rank(block: nn.Sequential) -> Callable[[], None]:
    parallel = nn.parallel.DistributedDataParallel(block, [torch.cuda.current_device()])
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return lambda: _run(parallel)


def _sharded(block: nn.Sequential) -> Callable[[], None]:
    for each in (block[0], block[2], block):
        fully_shard(each)
    return lambda: _run(block)


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


def _uneven(block: nn.Sequential) -> Callable[[], None]:
    if dist.get_rank() == dist.get_world_size() - 1:
        block.append(nn.Linear(512, 2048)).append(nn.Linear(2048, 512)).cuda()
    return _pipeline(block)


def _interleaved(block: nn.Sequential) -> Callable[[], None]:
    """Two stages on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device, last = torch.device("cuda", torch.cuda.current_device()), 2 * size - 1
    halves = (block, nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512)).cuda())
    stages = [
        PipelineStage(part, place, last + 1, device)
        for part, place in zip(halves, (rank, rank + size), strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)

    def step() -> None:
        numbers = torch.randn(64, 512, device="cuda")
        schedule.step(
            *([numbers] if rank == 0 else []), **({"target": numbers} if rank == size - 1 else {})
        )

    return step


_KINDS = {
    "tensors": _tensors,
    "data": _data,
    "halved": _halved,
    "low rank": _of_low_rank,
    "states": _data,
    "sharded": _sharded,
    "pipeline": _pipeline,
    "uneven": _uneven,
    "interleaved": _interleaved,
}


def _train(kind: str) -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    block = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
    step = _KINDS[kind](block)
    optimizer: torch.optim.Optimizer
    if kind == "states":
        optimizer = ZeroRedundancyOptimizer(block.parameters(), torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW(block.parameters())
    for _ in range(4 if kind == "low rank" else 2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    print(f"peak of rank {dist.get_rank()}: {torch.cuda.max_memory_allocated()}", flush=True)


if __name__ == "__main__":
    _train(sys.argv[1])
