"""Copies and sums between the devices of one process, for ``torch/nn/parallel/comm.py`` and ``torch/cuda/comm.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.cuda.comm

from torchdevice.context import Context
from torchdevice.cuda.nccl import reduced
from torchdevice.patching import Patch, replaced_function
from torchdevice.supplied import supplied_function


def _device_of(context: Context, index: int) -> torch.device:
    """Return the device of an ordinal. ``torch.nn.parallel.comm`` writes -1 for the CPU."""
    return torch.device("cpu") if index < 0 else context.device(index)


@supplied_function("_broadcast")
def comm_broadcast(context: Context, tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensor itself for the first device and copies for the others."""
    return [tensor.to(_device_of(context, device), copy=bool(i)) for i, device in enumerate(devices)]


@supplied_function("_broadcast_out")
def comm_broadcast_out(context: Context, tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the tensor into each of ``out`` and return these."""
    return [each.copy_(tensor) for each in out]


@supplied_function("_broadcast_coalesced")
def comm_broadcast_coalesced(
    context: Context, tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """Return all tensors for each device: the tensors themselves for the first device, copies for the others."""
    return [
        [tensor.to(_device_of(context, device), copy=bool(i)) for tensor in tensors] for i, device in enumerate(devices)
    ]


@supplied_function("_scatter")
def comm_scatter(
    context: Context,
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Any = None,
) -> list[torch.Tensor]:
    """Split the tensor along ``dim`` and return one chunk on each device."""
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    # Not strict: chunk() returns fewer chunks than devices where the dimension is shorter.
    return [chunk.to(_device_of(context, device)) for chunk, device in zip(chunks, devices, strict=False)]


@supplied_function("_scatter_out")
def comm_scatter_out(
    context: Context, tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Any = None
) -> list[torch.Tensor]:
    """Split the tensor along ``dim`` and copy one chunk into each of ``out``."""
    chunks = tensor.split([each.size(dim) for each in out], dim)
    return [each.copy_(chunk) for each, chunk in zip(out, chunks, strict=True)]


@supplied_function("_gather")
def comm_gather(
    context: Context, tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None
) -> torch.Tensor:
    """Concatenate the tensors along ``dim`` on the destination; None means the current device."""
    device = _device_of(context, context.thread.device_index if destination is None else destination)
    return torch.cat([tensor.to(device) for tensor in tensors], dim)


@supplied_function("_gather_out")
def comm_gather_out(context: Context, tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    """Copy the tensors one after the other along ``dim`` into ``out``, and return ``out``."""
    for part, tensor in zip(out.split([each.size(dim) for each in tensors], dim), tensors, strict=True):
        part.copy_(tensor)
    return out


def _reduce_add(context: Context, original: Any, inputs: Any, destination: Any = None) -> torch.Tensor:
    if not context.runtime.shares_host_memory:
        return original(inputs, destination)
    return reduced(inputs)  # torch's own function refuses CPU tensors


def patches() -> list[Patch]:
    """Return the patches of ``reduce_add``."""
    return [
        replaced_function(torch.nn.parallel.comm, "reduce_add", _reduce_add, native_to="cuda"),
        replaced_function(torch.cuda.comm, "reduce_add", _reduce_add, native_to="cuda"),
    ]
