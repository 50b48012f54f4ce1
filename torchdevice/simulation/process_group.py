"""Collectives between processes with simulated devices: gloo, on CPU tensors that share the memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from torchdevice.simulation.kernels import aliased, index_of
from torchdevice.torch_internals import require

BACKEND = "simulated_gloo"


_COLLECTIVES = {
    **{name: name for name in ("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "broadcast")},
    **{name: name for name in ("reduce", "scatter", "gather", "reduce_scatter", "alltoall", "barrier")},
    **dict.fromkeys(("_allgather_base", "all_gather_single"), "_allgather_base"),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), "_reduce_scatter_base"),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), "alltoall_base"),
}
"""Method of a process group -> method of gloo. Both names are listed of methods that torch 2.12 renamed."""


_COALESCED = {
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), "_allgather_base"),
    **dict.fromkeys(("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), "_reduce_scatter_base"),
}
"""Method for lists of outputs and inputs -> method of gloo, which is called for each pair."""


_POINT_TO_POINT = ("send", "recv", "recv_anysource")


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or index_of(value) < 0:
        return value
    return aliased(value)


def _collective(name: str) -> Callable[..., Any]:
    def method(self: StagedProcessGroup, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            getattr(self.gloo, name)(*pytree.tree_map(_on_cpu, args), **pytree.tree_map(_on_cpu, kwargs)).wait()
        return _done(args[0] if args else None)

    return method


def _coalesced(name: str) -> Callable[..., Any]:
    def method(self: StagedProcessGroup, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            for output, given in zip(outputs, inputs, strict=True):
                getattr(self.gloo, name)(_on_cpu(output), _on_cpu(given)).wait()
        return _done(outputs)

    return method


def _point_to_point(name: str) -> Callable[..., Any]:
    def method(self: StagedProcessGroup, *args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return getattr(self.gloo, name)(*pytree.tree_map(_on_cpu, args))

    return method


def _done(outputs: Any) -> Any:
    """Return finished work whose result is ``outputs``, the program's own argument."""
    future: Any = torch.futures.Future()
    future.set_result(outputs)
    return require(torch._C._distributed_c10d, "_create_work_from_future")(future)


class StagedProcessGroup(dist.ProcessGroup):
    """A process group over gloo for tensors of the simulated device and of the CPU."""

    def __init__(self, rank: int, size: int, gloo: Any):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo = gloo

    def getBackendName(self) -> str:
        """Return the name under which the process group is registered with torch."""
        return BACKEND


for _name, _of_gloo in _COLLECTIVES.items():
    setattr(StagedProcessGroup, _name, _collective(_of_gloo))


for _name, _of_gloo in _COALESCED.items():
    setattr(StagedProcessGroup, _name, _coalesced(_of_gloo))


for _name in _POINT_TO_POINT:
    setattr(StagedProcessGroup, _name, _point_to_point(_name))


def _create(store: Any, rank: int, size: int, timeout: Any) -> StagedProcessGroup:
    return StagedProcessGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


@functools.cache
def register() -> str:
    """Register the process group with torch, once, and return its name."""
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    return BACKEND
