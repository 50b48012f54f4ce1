"""Copies and sums between the devices of one process, for ``torch/nn/parallel/comm.py`` and ``torch/cuda/comm.py``.

The refusals and their texts follow ``torch/csrc/cuda/comm.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.cuda.comm

from torchdevice.calls.rewriters import native_device
from torchdevice.kernel.bindings import replaces, supplied_function
from torchdevice.kernel.context import Context
from torchdevice.kernel.torch_texts import text


def _require(condition: bool, name: str, **values: Any) -> None:
    if not condition:
        raise RuntimeError(text(name, **values))


def _device_of(context: Context, index: int) -> torch.device:
    _require(index >= 0, "negative device index", index=index)
    return context.device(index)


def _require_on_device(context: Context, tensor: torch.Tensor, name: str, index: int) -> None:
    # On a target that is the CPU no tensor is known to be on the host.
    on_host = not context.runtime.shares_host_memory and native_device(tensor).type != context.device_type
    _require(not on_host, name, i=index, device=native_device(tensor))


@supplied_function("_broadcast")
def comm_broadcast(context: Context, tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensor itself for its own device and copies for the others.

    Several ordinals may mean one device of the target. The tensor itself is for the first of these.
    """
    targets = [(device, _device_of(context, device)) for device in devices]
    home = next((device for device, target in targets if target == native_device(tensor)), None)
    return [tensor if device == home else tensor.to(target, copy=True) for device, target in targets]


@supplied_function("_broadcast_out")
def comm_broadcast_out(context: Context, tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the tensor into each of ``out`` and return these."""
    source = list(tensor.shape)
    for i, each in enumerate(out):
        _require_on_device(context, each, "output on the host", i)
        _require(each.shape == tensor.shape, "broadcast out of shape", i=i, shape=list(each.shape), source=source)
    return [each.copy_(tensor, non_blocking=True) for each in out]


@supplied_function("_broadcast_coalesced")
def comm_broadcast_coalesced(
    context: Context, tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """Return all tensors for each device: the tensors themselves for the first device, copies for the others."""
    first = _device_of(context, devices[0])
    there = all(native_device(tensor) == first for tensor in tensors) or context.runtime.shares_host_memory
    _require(there, "coalesced on another device", index=devices[0])
    copies = [comm_broadcast(context, tensor, devices) for tensor in tensors]
    return [list(on_device) for on_device in zip(*copies, strict=True)] or [[] for _ in devices]


def _on_stream(streams: Sequence[Any] | None, i: int, device: int) -> AbstractContextManager[Any]:
    """Return what makes the stream current that the caller chose for a chunk, if any."""
    stream = streams[i] if streams is not None and i < len(streams) else None
    if stream is None:
        return nullcontext()
    index = stream.device_index
    _require(index == device, "stream of another device", i=i, index=index, expected=device)
    return stream


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
    _require(bool(devices), "scattered to nothing", what="device")
    sizes = len(devices) if chunk_sizes is None else len(chunk_sizes)
    _require(len(devices) == sizes, "scattered in other chunks", devices=len(devices), sizes=sizes)
    chunks = list(tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim))
    # Not strict: chunk() returns fewer chunks than devices where the dimension is shorter.
    for i, (chunk, device) in enumerate(zip(chunks, devices, strict=False)):
        target = _device_of(context, device)
        if target != native_device(tensor):
            with _on_stream(streams, i, device):
                chunks[i] = chunk.to(target, non_blocking=True)
    return chunks


@supplied_function("_scatter_out")
def comm_scatter_out(
    context: Context, tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Any = None
) -> list[torch.Tensor]:
    """Split the tensor along ``dim`` and copy one chunk into each of ``out``."""
    _require(bool(out), "scattered to nothing", what="output tensor")
    # Counted from the first. `size` raises torch's IndexError.
    dim = range(tensor.dim())[dim] if -tensor.dim() <= dim < tensor.dim() else tensor.size(dim)
    for i, each in enumerate(out):
        _require_on_device(context, each, "output on the host", i)
        shapes = {"shape": list(each.shape), "source": list(tensor.shape)}
        _require(_without(dim, each) == _without(dim, tensor), "scattered out of shape", i=i, dim=dim, **shapes)
    sizes, expected = [each.size(dim) for each in out], tensor.size(dim)
    _require(sum(sizes) == expected, "scattered out of size", dim=dim, expected=expected, total=sum(sizes))
    for i, (each, chunk) in enumerate(zip(out, tensor.split(sizes, dim), strict=True)):
        with _on_stream(streams, i, each.get_device()):
            each.copy_(chunk, non_blocking=True)
    return list(out)


def _without(dim: int, tensor: torch.Tensor) -> list[int]:
    return [*tensor.shape[:dim], *tensor.shape[dim + 1 :]] if tensor.dim() > dim else [-1]


def _shape_of_all(context: Context, tensors: Sequence[torch.Tensor], dim: int) -> list[int]:
    """Return the shape of the tensors one after the other along ``dim``."""
    _require(bool(tensors), "gathered from nothing")
    expected = list(tensors[0].shape)
    for i, tensor in enumerate(tensors):
        _require_on_device(context, tensor, "input on the host", i)
        shape = list(tensor.shape)
        _require(len(shape) == len(expected), "gathered dimensions", i=i, dims=len(shape), expected=len(expected))
        expected[dim] = tensor.size(dim)
        _require(shape == expected, "gathered of shape", i=i, shape=shape, expected=expected)
    expected[dim] = sum(tensor.size(dim) for tensor in tensors)
    return expected


@supplied_function("_gather")
def comm_gather(
    context: Context, tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None
) -> torch.Tensor:
    """Concatenate the tensors along ``dim`` on the destination; None means the current device, -1 the CPU."""
    _shape_of_all(context, tensors, dim)
    index = context.thread.device_index if destination is None else destination
    device = torch.device("cpu") if index == -1 else _device_of(context, index)
    return torch.cat([tensor.to(device, non_blocking=index != -1) for tensor in tensors], dim)


@supplied_function("_gather_out")
def comm_gather_out(context: Context, tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    """Copy the tensors one after the other along ``dim`` into ``out``, and return ``out``."""
    expected, shape = _shape_of_all(context, tensors, dim), list(out.shape)
    _require(shape == expected, "gathered out of shape", shape=shape, expected=expected)
    for part, tensor in zip(out.split([each.size(dim) for each in tensors], dim), tensors, strict=True):
        part.copy_(tensor)
    return out


@replaces(torch.nn.parallel.comm, "reduce_add", native_to="cuda", by_value=True)
def _reduce_add(context: Context, original: Any, inputs: Any, destination: Any = None) -> torch.Tensor:
    if not context.runtime.shares_host_memory:
        return original(inputs, destination)
    return sum(inputs[1:], inputs[0])  # torch's own function refuses CPU tensors
