"""Results for the works of torch's fake groups: theirs have none (``FakeWork``, in C++).

DDP's reducer and its communication hooks read the reduced bucket from the future of a work. Each
operator of a collective has its outputs as its first argument.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.stand_ins import tensors
from torchdevice.torch_modules.distributed.nccl_group import done
from torchdevice.torch_modules.distributed.process_groups import FAKE_RANKS

OPERATORS = (
    "allreduce_",
    "allreduce_coalesced_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "reduce_",
    "scatter_",
    "gather_",
)
"""The operators of ``c10d`` whose works have a future."""

LACKED = ("gather_into_tensor_",)
"""Operators since torch 2.14 that return a tensor and a work, and that fake groups refuse: "Backend
fake does not support gather_single".
"""


def give_results() -> None:
    """Let collectives of fake groups return works with results, in contexts with fake ranks.

    May be called again.
    """
    kernels = {**dict.fromkeys(OPERATORS, _run), **dict.fromkeys(LACKED, _stand_in)}
    for name, kernel in kernels.items():
        for key in ("CPU", "PrivateUse1"):
            registered_kernels.put_in_front(f"c10d::{name}", key, kernel, "works of fake groups")


def _run(keys: Any, own: registered_kernels.Own, *args: Any, **kwargs: Any) -> Any:
    found = own(*args, **kwargs)
    if not _has_fake_ranks():
        return found
    work = _work(args[0])
    return (*found[:-1], work) if isinstance(found, (tuple, list)) else work


def _stand_in(keys: Any, own: registered_kernels.Own, *args: Any, **kwargs: Any) -> Any:
    return (args[0], _work(args[0])) if _has_fake_ranks() else own(*args, **kwargs)


def _has_fake_ranks() -> bool:
    context = thread_state.state.context
    return context is not None and FAKE_RANKS in context.settings


def _work(outputs: Any) -> Any:
    """Return a work that is done, with these outputs."""
    create: Any = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
    return create(done([*tensors(outputs)])).boxed()
