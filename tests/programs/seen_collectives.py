"""A rank's collectives as seen by dispatch modes and profiler, and their results, as JSON.

The command line says the file for what rank 0 sees, and the backend of the program.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

warnings.simplefilter("ignore")
BACKEND = sys.argv[2]
DEVICE = "cpu" if BACKEND == "gloo" else "cuda"


class Noting(TorchDispatchMode):
    """Notes each collective, with the values of its first tensor before it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func is not torch.ops.c10d.barrier.default:
            self.noted.append([str(func), len(args), _first(args).tolist()])
        return func(*args, **(kwargs or {}))


def _first(given: Any) -> torch.Tensor:
    # The root has lists that others lack.
    return next(each for each in tree_leaves(given) if isinstance(each, torch.Tensor))


def _numbers(count: int = 4) -> torch.Tensor:
    return torch.arange(float(count), device=DEVICE) + 10 * dist.get_rank()


def _move() -> None:
    """Send a tensor to rank 1."""
    if dist.get_rank() == 0:
        dist.send(_numbers(), 1)
    else:
        dist.recv(_numbers(), 0)


CALLS: list[Callable[[], Any]] = [
    lambda: dist.all_reduce(_numbers()),
    lambda: dist.all_reduce(_numbers(), async_op=True).wait(),
    lambda: dist.broadcast(_numbers(), 0),
    lambda: dist.reduce(_numbers(), 0),
    lambda: dist.all_gather([_numbers(), _numbers()], _numbers()),
    lambda: dist.all_gather_into_tensor(_numbers(8), _numbers()),
    lambda: dist.reduce_scatter_tensor(_numbers(2), _numbers()),
    lambda: dist.all_to_all_single(_numbers(), _numbers()),
    lambda: dist.scatter(_numbers(), [_numbers(), _numbers()] if dist.get_rank() == 0 else None, 0),
    lambda: dist.gather(_numbers(), [_numbers(), _numbers()] if dist.get_rank() == 0 else None, 0),
    _move,
    dist.barrier,
]


def _repeated() -> list[list[Any]]:
    """Return the tensors of collectives, which each run as operators first, and then again."""
    dist.group.WORLD.allreduce_coalesced([_numbers(), _numbers(3)]).wait()
    return [[_results(), _results()] for _ in range(2)]


def _results() -> list[Any]:
    """Return the tensors of collectives that a rank reads and writes."""
    mine, outputs = _numbers(), [_numbers(), _numbers()]
    whole, part = _numbers(8), _numbers(2)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    given = torch.nn.Parameter(mine + dist.get_rank())
    with torch.no_grad():
        dist.all_reduce(given)
    dist.all_gather(outputs, given.detach())
    dist.all_gather_into_tensor(whole, mine)
    dist.reduce_scatter_tensor(part, outputs[1])
    dist.broadcast(part, 1)
    dist.all_to_all_single(mine, whole[:4].clone())
    work = dist.group.WORLD.allreduce_coalesced([whole, part])
    work.wait()
    return [each.tolist() for each in (mine, given, *outputs, whole, part)]


def _transformed() -> str:
    """Return the type of what a collective of a batch raises, of which torch has no rule."""
    try:
        torch.func.vmap(lambda row: dist.all_reduce(row) or row)(_numbers())
    except Exception as error:
        return type(error).__name__
    return ""


def _traced(path: Path) -> list[str]:
    """Return the collectives in a trace of the execution."""
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    observer.start()
    dist.all_reduce(_numbers())
    observer.stop()
    observer.unregister_callback()
    nodes = json.loads(path.read_text())["nodes"]
    return [node["name"] for node in nodes if node["name"].startswith("c10d::")]


def _functional() -> list[Any]:
    """Return what the functional collectives give that write into a tensor of the program."""
    functional, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    whole, part = torch.empty(8, device=DEVICE), torch.empty(2, device=DEVICE)
    functional.wait_tensor(functional.all_gather_into_tensor_out(_numbers(), 2, name, out=whole))
    functional.wait_tensor(
        functional.reduce_scatter_tensor_out(_numbers(), "sum", 2, name, out=part)
    )
    return [whole.tolist(), part.tolist()]


def _apart() -> list[Any]:
    """Return collectives' results for tensors whose class decomposes operators, memory-less."""
    # Which registers a pytree, for all that follows.
    from torch.testing._internal.two_tensor import TwoTensor

    mine = TwoTensor(_numbers(), -_numbers())
    parts = [TwoTensor(_numbers() + part, _numbers()) for part in range(2)]
    dist.all_reduce(mine)
    reduced = [mine.a.tolist()]
    dist.scatter(mine, parts if dist.get_rank() == 0 else None, 0)
    # Not the second tensors: the class drops their work, and plain torch the memory it reads.
    return [*reduced, mine.a.tolist()]


def _counted() -> dict[str, int]:
    """Return how often torch counts each collective, below a mode that notes them."""
    with Noting() as noting, CommDebugMode() as mode:
        for call in CALLS:
            call()
    return {
        **{str(name): count for name, count in mode.get_comm_counts().items()},
        "noted": noting.noted,
    }


def _profiled() -> list[str]:
    with torch.profiler.profile() as profile:
        dist.all_reduce(_numbers())
    return [event.name for event in profile.events() if event.name.startswith("c10d::")]


def _faked() -> list[int]:
    with FakeTensorMode():
        numbers = torch.ones(3, device=DEVICE)
        dist.all_reduce(numbers)
    return list(numbers.shape)


def _ddp() -> dict[str, int]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to(DEVICE))
    with CommDebugMode() as mode:
        model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    return {str(name): count for name, count in mode.get_comm_counts().items()}


def _program(path: str) -> None:
    dist.init_process_group(BACKEND)
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank())
    trace = Path(f"{path}.{dist.get_rank()}")
    found = [_repeated(), _counted(), _functional(), _profiled(), _faked(), _ddp(), _apart()]
    found += [_traced(trace), _transformed()]
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()
    if BACKEND == "gloo":
        # Threads that torch's profiler and gloo leave behind can abort plain torch's process while
        # C++ ends it.
        os._exit(0)


if __name__ == "__main__":
    _program(sys.argv[1])
