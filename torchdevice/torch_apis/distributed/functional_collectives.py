"""Functional collectives that torch's C++ does past a group's methods in Python, for out-of-tree devices."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

_c10d = dist.distributed_c10d


@functools.cache  # once in a process
def register() -> torch.library.Library:
    """Register kernels that call the group's methods. They stay for the process."""
    functional = torch.library.Library("_c10d_functional", "IMPL")
    functional.impl("all_gather_into_tensor_out", _all_gather, "PrivateUse1")
    functional.impl("reduce_scatter_tensor_out", _reduce_scatter, "PrivateUse1")
    return functional


def _all_gather(given: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor) -> torch.Tensor:
    _c10d._resolve_process_group(group_name)._allgather_base(out, given).wait()
    return out


def _reduce_scatter(
    given: torch.Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    options = _c10d.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, reduce_op.upper())
    _c10d._resolve_process_group(group_name)._reduce_scatter_base(out, given, options).wait()
    return out
