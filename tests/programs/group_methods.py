"""Two ranks' results: a process group's documented calls, beside gloo's own group."""

import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
TIMEOUT = datetime.timedelta(seconds=60)
_c10d = torch._C._distributed_c10d


def _numbers(device: str, start: int = 0) -> torch.Tensor:
    return torch.arange(4.0, device=device) + start + 10 * dist.get_rank()


def _options(name: str, **values: Any) -> Any:
    options = getattr(_c10d, name)()
    for field, value in values.items():
        setattr(options, field, value)
    return options


class Given:
    """The tensors that a form of a call takes and fills.

    Args:
        device: Where they lie.
    """

    def __init__(self, device: str):
        self.one, self.other = _numbers(device), _numbers(device, 100)
        self.parts = [torch.zeros(4, device=device) for _ in range(2)]
        self.more = [torch.zeros(4, device=device) for _ in range(2)]
        self.whole = torch.zeros(8, device=device)
        # Only the root gives or takes lists.
        self.at_root = dist.get_rank() == 0

    def all(self) -> list[Any]:
        """Return the values of all tensors."""
        return [
            each.tolist() for each in (self.one, self.other, *self.parts, *self.more, self.whole)
        ]


FORMS: dict[str, Callable[[Any, Given], Any]] = {
    "allreduce(list)": lambda pg, t: pg.allreduce([t.one]),
    "allreduce(list, options)": lambda pg, t: pg.allreduce([t.one], _options("AllreduceOptions", reduceOp=MAX)),
    "allreduce(list, op)": lambda pg, t: pg.allreduce([t.one], MAX),
    "allreduce(list, op=, timeout=)": lambda pg, t: pg.allreduce([t.one], op=SUM, timeout=TIMEOUT),
    "allreduce(tensor)": lambda pg, t: pg.allreduce(t.one),
    "allreduce(tensor, op)": lambda pg, t: pg.allreduce(t.one, MAX),
    "allreduce(tensor=, op=)": lambda pg, t: pg.allreduce(tensor=t.one, op=MAX),
    "allreduce_coalesced(list)": lambda pg, t: pg.allreduce_coalesced([t.one, t.other]),
    "broadcast(list)": lambda pg, t: pg.broadcast([t.one]),
    "broadcast(list, options)": lambda pg, t: pg.broadcast([t.one], _options("BroadcastOptions", rootRank=1)),
    "broadcast(tensor, root)": lambda pg, t: pg.broadcast(t.one, 1),
    "broadcast(tensor, root=)": lambda pg, t: pg.broadcast(t.one, root=1),
    "allgather(lists, list)": lambda pg, t: pg.allgather([t.parts], [t.one]),
    "allgather(list, tensor)": lambda pg, t: pg.allgather(t.parts, t.one),
    "allgather(list, tensor, "
    "timeout=)": lambda pg, t: pg.allgather(t.parts, t.one, timeout=TIMEOUT),
    "gather(list, tensor, root)": lambda pg, t: pg.gather(t.parts if t.at_root else [], t.one, 0),
    "gather(lists, list)": lambda pg, t: pg.gather([t.parts] if t.at_root else [], [t.one]),
    "scatter(tensor, list, "
    "root)": lambda pg, t: pg.scatter(t.whole[:4], [t.one, t.other] if t.at_root else [], 0),
    "scatter(list, lists)": lambda pg, t: pg.scatter([t.whole[:4]], [[t.one, t.other]] if t.at_root else []),
    "reduce(tensor, root)": lambda pg, t: pg.reduce(t.one if t.at_root else t.one + 0, 0),
    "reduce(tensor, root, op)": lambda pg, t: pg.reduce(t.one if t.at_root else t.one + 0, 0, MAX),
    "reduce_scatter(tensor, list)": lambda pg, t: pg.reduce_scatter(t.whole[:4], [t.one, t.other]),
    "reduce_scatter(tensor, list, "
    "op)": lambda pg, t: pg.reduce_scatter(t.whole[:4], [t.one, t.other], MAX),
    "reduce_scatter(list, "
    "lists)": lambda pg, t: pg.reduce_scatter([t.whole[:4]], [[t.one, t.other]]),
    "alltoall_base(tensors, sizes)": lambda pg, t: pg.alltoall_base(t.whole[:4], t.one, [], []),
    "alltoall_base(tensors, sizes, "
    "timeout=)": lambda pg, t: pg.alltoall_base(t.parts[0], t.one, [2, 2], [2, 2],
        timeout=TIMEOUT),
    "_allgather_base(tensors)": lambda pg, t: pg._allgather_base(t.whole, t.one),
    "_reduce_scatter_base(tensors)": lambda pg, t: pg._reduce_scatter_base(t.parts[0], t.whole + t.one.repeat(2)),
    "barrier()": lambda pg, t: pg.barrier(),
    "barrier(timeout=)": lambda pg, t: pg.barrier(timeout=TIMEOUT),
    "send and recv": lambda pg, t: pg.send([t.one], 1, 0) if t.at_root else pg.recv([t.one], 0, 0),
}  # fmt: skip
"""A call of a method of a group, by how it is written."""


def outcomes(device: str, group: Any) -> dict[str, Any]:
    """Return what all tensors are after each form, or its error."""
    found: dict[str, Any] = {}
    for form, call in FORMS.items():
        given = Given(device)
        try:
            work = call(group, given)
            if work is not None:
                work.wait()
            found[form] = given.all()
        except Exception as error:
            found[form] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found


def _ddp_gradient(hook: Callable[[Any], None]) -> list[float]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).cuda())
    hook(model)
    model(torch.full((1, 2), 1.0 + dist.get_rank(), device="cuda")).sum().backward()
    return model.module.weight.grad.flatten().tolist()


def _own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return (
        state.allreduce([bucket.buffer()]).get_future().then(lambda future: future.value()[0] / 2)
    )


def _wait_too_short(made: Any, beside: dist.ProcessGroupGloo) -> bool:
    """Return whether the first rank's wait for the waiting second ends by NCCL's error."""
    if dist.get_rank():
        beside.barrier().wait()
    work, timed_out = made.allreduce(torch.ones(2, device="cuda")), True
    if not dist.get_rank():
        try:
            work.wait(datetime.timedelta(milliseconds=100))
            timed_out = False
        except dist.DistBackendError as error:
            timed_out = "timeout" in str(error)
        beside.barrier().wait()
    work.wait()
    return timed_out


def _others() -> dict[str, Any]:
    """Return what else a program asks of a group for NCCL."""
    world = dist.group.WORLD
    split = dist.split_group(split_ranks=[[0, 1]])
    numbers = torch.ones(2, device="cuda")
    dist.all_reduce(numbers, group=split)
    builtin = [
        _ddp_gradient(lambda model, kind=kind: model._register_builtin_comm_hook(kind))
        for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS)
    ]
    store = dist.PrefixStore("made", world.get_group_store())
    made, beside = (
        kind(store, dist.get_rank(), 2) for kind in (dist.ProcessGroupNCCL, dist.ProcessGroupGloo)
    )
    more = torch.ones(2, device="cuda")
    made.allreduce(more).wait()
    return {
        "late": _wait_too_short(made, beside),
        "split": [numbers.tolist(), split.size(), dist.get_backend(split)],
        "hooks": [
            *builtin,
            _ddp_gradient(lambda model: model.register_comm_hook(world, _own_hook)),
        ],
        "made": more.tolist(),
        "configuration": dist.get_backend_config(),
        "time-out in minutes": dist.distributed_c10d._get_default_timeout("nccl").total_seconds()
        / 60,
    }


def _observed() -> dict[str, Any]:
    """Return what a hook is told of collectives, and which collectives are refused."""
    os.environ["TORCH_NCCL_NAN_CHECK"] = "1"
    group, infos = dist.new_group(), []
    group._register_on_completion_hook(infos.append)
    numbers = torch.ones(2, device="cuda")
    dist.all_reduce(numbers, group=group)
    dist.all_gather([torch.empty_like(numbers) for _ in range(2)], numbers, group=group)
    found = {
        "hook": [
            [info.op_type.name, info.seq, info.time_started <= info.time_finished] for info in infos
        ],
        "sequence": group._get_sequence_number_for_group(),
        "NaN": _error(lambda: dist.all_reduce(numbers * float("nan"), group=group)),
        "variables": [
            _with_variable(name, value) for name in _VARIABLES for value in ("abc", "-1", "False")
        ],
    }
    late = dist.new_group()
    dist.barrier(late)
    if dist.get_rank() == 0:
        short = datetime.timedelta(seconds=0.5)
        found["late"] = "Timed out waiting 500ms" in _error(
            lambda: late.allreduce([numbers], timeout=short).wait()
        )
    dist.barrier()
    return found


_VARIABLES = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_NAN_CHECK")


def _with_variable(name: str, value: str) -> str:
    """Return the error that a group for NCCL raises as it is made with such a variable."""
    os.environ[name] = value
    try:
        return _error(lambda: dist.ProcessGroupNCCL(dist.HashStore(), 0, 1))
    finally:
        del os.environ[name]


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _shared_device() -> list[float]:
    """Return a sum over the ranks of a gloo group that are on one device, which NCCL refuses."""
    numbers = torch.ones(2, device="cuda:0")
    dist.all_reduce(numbers, group=dist.new_group(backend="gloo"))
    return numbers.tolist()


def _program(folder: str) -> None:
    """Write what each rank found into a file of its own."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.cuda.set_device(rank)
    plain = dist.ProcessGroup(dist.HashStore(), rank, 2)
    store = dist.PrefixStore("plain", dist.group.WORLD.get_group_store())
    gloo = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)
    plain._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    plain._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    found = [
        outcomes("cuda", dist.group.WORLD),
        outcomes("cpu", plain),
        _others(),
        _shared_device(),
        _observed(),
    ]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    _program(sys.argv[1])
