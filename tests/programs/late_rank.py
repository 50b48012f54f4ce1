"""Collectives with ``async_op=True`` that one rank begins late, for NCCL and for gloo.

The first argument is a folder. Each rank writes there, by its number, what it found.
"""

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Begin = Callable[[], tuple[Any, list[torch.Tensor]]]


def begins(device: str, group: Any) -> dict[str, Begin]:
    """Return what begins each collective, and returns its work and what it writes to."""

    def mine(*shape: int) -> torch.Tensor:
        return torch.full(shape, dist.get_rank() + 1.0, device=device)

    def of(
        call: Callable[..., Any], written: list[torch.Tensor], *args: Any
    ) -> tuple[Any, list[torch.Tensor]]:
        return call(*args, group=group, async_op=True), written

    def gathered() -> list[torch.Tensor]:
        return [mine(3) for _ in range(2)]

    def all_reduce() -> Any:
        x = mine(3)
        return of(dist.all_reduce, [x], x)

    def broadcast() -> Any:
        x = mine(3)
        return of(dist.broadcast, [x], x, 1)

    def reduce() -> Any:
        x = mine(3)
        return of(dist.reduce, [x] if dist.get_rank() == 0 else [], x, 0)

    def all_gather() -> Any:
        into = gathered()
        return of(dist.all_gather, into, into, mine(3))

    def all_gather_into_tensor() -> Any:
        into = mine(6)
        return of(dist.all_gather_into_tensor, [into], into, mine(3))

    def reduce_scatter_tensor() -> Any:
        into = mine(3)
        return of(dist.reduce_scatter_tensor, [into], into, mine(6))

    def scatter() -> Any:
        into = mine(3)
        return of(dist.scatter, [into], into, gathered() if dist.get_rank() == 1 else None, 1)

    def gather() -> Any:
        into = gathered() if dist.get_rank() == 0 else None
        return of(dist.gather, into or [], mine(3), into, 0)

    def all_to_all_single() -> Any:
        into = mine(4)
        return of(dist.all_to_all_single, [into], into, mine(4))

    def barrier() -> Any:
        return of(dist.barrier, [])

    found = (
        all_reduce,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter_tensor,
    )
    return {each.__name__: each for each in (*found, scatter, gather, all_to_all_single, barrier)}


def outcomes(device: str, group: Any, store: Any) -> dict[str, Any]:
    """Return per collective whether it ended with a late rank, and at the end; and its output."""
    found = {}
    for name, begin in begins(device, group).items():
        # Not the device's type, which on a CPU target is the CPU's for both.
        key = f"{dist.get_backend(group)} {name}"
        if dist.get_rank():
            store.wait([key])
        work, written = begin()
        early = work.is_completed()
        store.set(key, "")
        work.wait()
        found[name] = [
            early if dist.get_rank() == 0 else None,
            work.is_completed(),
            [x.tolist() for x in written],
        ]
    return found


def goes_on(group: Any) -> list[Any]:
    """Do what ends only if a collective goes on while the program does something else."""
    x, y, rank = torch.ones(3, device="cuda"), torch.ones(3, device="cuda"), dist.get_rank()
    if rank == 0:  # what a pipeline does: it sums gradients while it receives activations
        work = dist.all_reduce(x, async_op=True)
        dist.recv(y, 1)
        work.wait()
    else:
        dist.send(y * 5, 0)
        dist.all_reduce(x)
    two = [torch.ones(3, device="cuda") for _ in range(2)]
    order = two if rank else two[::-1]
    works = [
        dist.all_reduce(each, async_op=True, group=None if each is two[0] else group)
        for each in order
    ]
    torch.cuda.synchronize()  # waits for NCCL's stream too
    ended = [each.is_completed() for each in works]
    third = torch.ones(3, device="cuda")
    for _ in range(3):  # in the order in which they were begun
        dist.all_reduce(third, async_op=True)
    dist.barrier()
    return [x.tolist(), y.tolist(), [each.tolist() for each in two], ended, third.tolist()]


def main() -> None:
    dist.init_process_group("nccl")
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    pair, on_cpu = dist.new_group(), dist.new_group(backend="gloo")
    with torch.inference_mode():
        first = outcomes(f"cuda:{torch.cuda.current_device()}", pair, store)
    found = [first, outcomes("cpu", on_cpu, store), goes_on(pair)]
    (pathlib.Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
