"""Copies and sums between one process's devices, for ``comm.py`` in ``nn/parallel`` and ``cuda``.

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


def _require(condition: bool, text: str, **values: Any) -> None:
    if not condition:
        raise RuntimeError(text.format(**values))


_NEGATIVE_DEVICE_INDEX = "Expected non-negative device index, but got {index}"


def _device_of(context: Context, index: int) -> torch.device:
    _require(index >= 0, _NEGATIVE_DEVICE_INDEX, index=index)
    return context.devices.at(index)


def _require_on_device(context: Context, tensor: torch.Tensor, text: str, index: int) -> None:
    # On a target that is the CPU no tensor is known to be on the host.
    on_host = (
        not context.runtime.shares_host_memory and native_device(tensor).type != context.device_type
    )
    _require(not on_host, text, i=index, device=native_device(tensor))


@supplied_function("_broadcast")
def comm_broadcast(
    context: Context, tensor: torch.Tensor, devices: Sequence[int]
) -> list[torch.Tensor]:
    """Return the tensor itself for its own device and copies for the others.

    Several ordinals may mean one device of the target. The tensor itself is for the first of these.
    """
    targets = [(device, _device_of(context, device)) for device in devices]
    home = next((device for device, target in targets if target == native_device(tensor)), None)
    return [
        tensor if device == home else tensor.to(target, copy=True) for device, target in targets
    ]


_BROADCAST_OUT_OF_SHAPE = (
    "Expected all output tensors to have same shape as the source tensor {source}, but output "
    "tensor at index {i} has shape {shape}"
)


_OUTPUT_ON_THE_HOST = (
    "Expected all output tensors to be CUDA tensors, but output tensor at index {i} has device "
    "'{device}'"
)


@supplied_function("_broadcast_out")
def comm_broadcast_out(
    context: Context, tensor: torch.Tensor, out: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Copy the tensor into each of ``out`` and return these."""
    source = list(tensor.shape)
    for i, each in enumerate(out):
        _require_on_device(context, each, _OUTPUT_ON_THE_HOST, i)
        _require(
            each.shape == tensor.shape,
            _BROADCAST_OUT_OF_SHAPE,
            i=i,
            shape=list(each.shape),
            source=source,
        )
    return [each.copy_(tensor, non_blocking=True) for each in out]


_COALESCED_ON_ANOTHER_DEVICE = "All tensors must be on devices[0]: {index}"


@supplied_function("_broadcast_coalesced")
def comm_broadcast_coalesced(
    context: Context, tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """Return all tensors per device: themselves for the first device, copies for others."""
    first = _device_of(context, devices[0])
    there = (
        all(native_device(tensor) == first for tensor in tensors)
        or context.runtime.shares_host_memory
    )
    _require(there, _COALESCED_ON_ANOTHER_DEVICE, index=devices[0])
    copies = [comm_broadcast(context, tensor, devices) for tensor in tensors]
    return [list(on_device) for on_device in zip(*copies, strict=True)] or [[] for _ in devices]


_STREAM_OF_ANOTHER_DEVICE = (
    "Expected the device associated with the stream at index {i} (was {index}) to match the device "
    "supplied at that index (expected {expected})"
)


def _on_stream(streams: Sequence[Any] | None, i: int, device: int) -> AbstractContextManager[Any]:
    """Return a context manager that selects the caller's stream for chunk i, or a null context."""
    stream = streams[i] if streams is not None and i < len(streams) else None
    if stream is None:
        return nullcontext()
    index = stream.device_index
    _require(index == device, _STREAM_OF_ANOTHER_DEVICE, i=i, index=index, expected=device)
    return stream


_SCATTERED_IN_OTHER_CHUNKS = (
    "Expected devices and chunk_sizes to be of same length, but got len(devices) = {devices} and "
    "len(chunk_sizes) = {sizes}"
)


_SCATTERED_TO_NOTHING = "Expected at least one {what} to scatter to"


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
    _require(bool(devices), _SCATTERED_TO_NOTHING, what="device")
    sizes = len(devices) if chunk_sizes is None else len(chunk_sizes)
    _require(len(devices) == sizes, _SCATTERED_IN_OTHER_CHUNKS, devices=len(devices), sizes=sizes)
    chunks = list(
        tensor.chunk(len(devices), dim)
        if chunk_sizes is None
        else tensor.split(list(chunk_sizes), dim)
    )
    # Not strict: chunk() returns fewer chunks than devices where the dimension is shorter.
    for i, (chunk, device) in enumerate(zip(chunks, devices, strict=False)):
        target = _device_of(context, device)
        if target != native_device(tensor):
            with _on_stream(streams, i, device):
                chunks[i] = chunk.to(target, non_blocking=True)
    return chunks


_SCATTERED_OUT_OF_SHAPE = (
    "Output tensor at index {i} has incorrect shape: {shape}. Expected same shape except for "
    "scatter dim {dim} as the source tensor: {source}"
)


_SCATTERED_OUT_OF_SIZE = (
    "Total size for output tensors along scatter dim {dim} does not match the source tensor size "
    "at dim {dim}. Expected {expected}, but got total size {total}"
)


@supplied_function("_scatter_out")
def comm_scatter_out(
    context: Context,
    tensor: torch.Tensor,
    out: Sequence[torch.Tensor],
    dim: int,
    streams: Any = None,
) -> list[torch.Tensor]:
    """Split the tensor along ``dim`` and copy one chunk into each of ``out``."""
    _require(bool(out), _SCATTERED_TO_NOTHING, what="output tensor")
    # Counted from the first. `size` raises torch's IndexError.
    dim = range(tensor.dim())[dim] if -tensor.dim() <= dim < tensor.dim() else tensor.size(dim)
    for i, each in enumerate(out):
        _require_on_device(context, each, _OUTPUT_ON_THE_HOST, i)
        shapes = {"shape": list(each.shape), "source": list(tensor.shape)}
        _require(
            _without(dim, each) == _without(dim, tensor),
            _SCATTERED_OUT_OF_SHAPE,
            i=i,
            dim=dim,
            **shapes,
        )
    sizes, expected = [each.size(dim) for each in out], tensor.size(dim)
    _require(
        sum(sizes) == expected, _SCATTERED_OUT_OF_SIZE, dim=dim, expected=expected, total=sum(sizes)
    )
    for i, (each, chunk) in enumerate(zip(out, tensor.split(sizes, dim), strict=True)):
        with _on_stream(streams, i, each.get_device()):
            each.copy_(chunk, non_blocking=True)
    return list(out)


def _without(dim: int, tensor: torch.Tensor) -> list[int]:
    return [*tensor.shape[:dim], *tensor.shape[dim + 1 :]] if tensor.dim() > dim else [-1]


_GATHERED_OF_SHAPE = "Input tensor at index {i} has invalid shape {shape}, but expected {expected}"


_GATHERED_DIMENSIONS = (
    "Expected all input tensors to have the same number of dimensions, but tensor at index {i}has "
    "{dims} dimensions, (expected {expected})"
)


_INPUT_ON_THE_HOST = (
    "Expected all input tensors to be CUDA tensors, but tensor at index {i} has device '{device}'"
)


_GATHERED_FROM_NOTHING = "Expected at least one tensor to gather from"


def _shape_of_all(context: Context, tensors: Sequence[torch.Tensor], dim: int) -> list[int]:
    """Return the shape of the tensors one after the other along ``dim``."""
    _require(bool(tensors), _GATHERED_FROM_NOTHING)
    expected = list(tensors[0].shape)
    for i, tensor in enumerate(tensors):
        _require_on_device(context, tensor, _INPUT_ON_THE_HOST, i)
        shape = list(tensor.shape)
        _require(
            len(shape) == len(expected),
            _GATHERED_DIMENSIONS,
            i=i,
            dims=len(shape),
            expected=len(expected),
        )
        expected[dim] = tensor.size(dim)
        _require(shape == expected, _GATHERED_OF_SHAPE, i=i, shape=shape, expected=expected)
    expected[dim] = sum(tensor.size(dim) for tensor in tensors)
    return expected


@supplied_function("_gather")
def comm_gather(
    context: Context, tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None
) -> torch.Tensor:
    """Concatenate tensors along ``dim`` on a device: None is the current one, -1 the CPU."""
    _shape_of_all(context, tensors, dim)
    index = context.thread.device_index if destination is None else destination
    device = torch.device("cpu") if index == -1 else _device_of(context, index)
    return torch.cat([tensor.to(device, non_blocking=index != -1) for tensor in tensors], dim)


_GATHERED_OUT_OF_SHAPE = "Expected out tensor to have shape {expected}, but got {shape}"


@supplied_function("_gather_out")
def comm_gather_out(
    context: Context, tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int
) -> torch.Tensor:
    """Copy the tensors one after the other along ``dim`` into ``out``, and return ``out``."""
    expected, shape = _shape_of_all(context, tensors, dim), list(out.shape)
    _require(shape == expected, _GATHERED_OUT_OF_SHAPE, shape=shape, expected=expected)
    for part, tensor in zip(
        out.split([each.size(dim) for each in tensors], dim), tensors, strict=True
    ):
        part.copy_(tensor)
    return out


@replaces(torch.nn.parallel.comm, "reduce_add", native_to="cuda", by_value=True)
def _reduce_add(
    context: Context, original: Any, inputs: Any, destination: Any = None
) -> torch.Tensor:
    if not context.runtime.shares_host_memory:
        return original(inputs, destination)
    return sum(inputs[1:], inputs[0])  # torch's own function refuses CPU tensors
