"""Collectives in CUDA graphs: what each replay writes, and what the calls themselves write.

The command line names the file for what the ranks see.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

Collective = Callable[[torch.Tensor, torch.Tensor], object]


def _move(given: torch.Tensor, out: torch.Tensor) -> None:
    """Send a tensor to the next rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = [
        dist.P2POp(dist.isend, given, (rank + 1) % size),
        dist.P2POp(dist.irecv, out[:4], (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def _overlapped(given: torch.Tensor, out: torch.Tensor) -> None:
    work = dist.all_gather_into_tensor(out, given, async_op=True)
    squares = given.square()
    work.wait()
    out[:4].add_(squares)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda given, out: dist.all_reduce(given),
    "all_reduce of averages": lambda given, out: dist.all_reduce(given, dist.ReduceOp.AVG),
    "broadcast": lambda given, out: dist.broadcast(given, 1),
    "all_gather": lambda given, out: dist.all_gather([*out.split(4)], given),
    "all_gather_into_tensor": lambda given, out: dist.all_gather_into_tensor(out, given),
    "reduce_scatter_tensor": lambda given, out: dist.reduce_scatter_tensor(out[:2], given),
    "all_to_all_single": lambda given, out: dist.all_to_all_single(out[:4], given),
    "functional": lambda given, out: out[:4].copy_(
        functional_all_reduce(given, "sum", dist.group.WORLD)
    ),
    "in place and functional": lambda given, out: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(given, "sum", dist.group.WORLD.group_name)
    ),
    "batch_isend_irecv": _move,
    "async_op": _overlapped,
}


def _values(turn: int) -> torch.Tensor:
    return torch.arange(4.0, device="cuda") * (turn + 2) + 10 * dist.get_rank()


def _runs(collective: Collective, graphed: bool) -> list[list[float]]:
    """Return what a collective and the kernel after it write in each of three turns."""
    given, out, after = _values(0), torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")

    def step() -> None:
        collective(given, out)
        after.copy_(out).add_(given.repeat(2))

    step()  # NCCL connects the ranks before a capture
    run = step
    if graphed:
        given.copy_(_values(0))
        before = [given.tolist(), out.tolist()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        assert [given.tolist(), out.tolist()] == before, "the capture was seen"
        run = graph.replay
    found = []
    for turn in range(3):
        given.copy_(_values(turn))
        run()
        found.append(given.tolist() + out.tolist() + after.tolist())
    return found


def _program(path: Path) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = {name: [_runs(each, True), _runs(each, False)] for name, each in COLLECTIVES.items()}
    path.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    _program(Path(sys.argv[1]))
