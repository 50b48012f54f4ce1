"""Copies and reductions between the devices of one process.

For ``torch/cuda/nccl.py`` and ``torch/nn/parallel/comm.py``. Tensors are moved and added by torch's own operators, in
the order of the devices, so that sums are reproducible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchdevice.bindings import supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_REDUCTIONS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    0: torch.add,
    1: torch.mul,
    2: torch.maximum,
    3: torch.minimum,
}
"""``ncclRedOp_t`` of nccl.h: sum, product, maximum, minimum."""


def reduced(inputs: Sequence[torch.Tensor], op: int = 0) -> torch.Tensor:
    """Return the sum, or another reduction, of tensors, on the device of the first."""
    if op not in _REDUCTIONS:
        raise RuntimeError(f"op={op!r} is no reduction of NCCL. Use 0 (sum), 1 (product), 2 (maximum) or 3 (minimum).")
    return functools.reduce(lambda a, b: _REDUCTIONS[op](a, b.to(a.device)), inputs)


@supplies("_nccl_all_reduce")
def all_reduce(
    scope: Scope, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], op: int = 0, *rest: Any
) -> None:
    """Reduce the inputs into every output."""
    total = reduced(inputs, op)
    with torch.no_grad():
        for output in outputs:
            output.copy_(total)


@supplies("_nccl_reduce")
def reduce(
    scope: Scope, inputs: Sequence[torch.Tensor], output: torch.Tensor, root: int = 0, op: int = 0, *rest: Any
) -> None:
    """Reduce the inputs into one output."""
    with torch.no_grad():
        output.copy_(reduced(inputs, op))


@supplies("_nccl_broadcast")
def broadcast(scope: Scope, inputs: Sequence[torch.Tensor], root: int = 0, *rest: Any) -> None:
    """Copy the root's tensor into the others."""
    with torch.no_grad():
        for index, tensor in enumerate(inputs):
            if index != root:
                tensor.copy_(inputs[root])


@supplies("_nccl_all_gather")
def all_gather(scope: Scope, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *rest: Any) -> None:
    """Put all inputs, one after the other, into every output."""
    with torch.no_grad():
        for output in outputs:
            for part, tensor in zip(output.view(-1).split(inputs[0].numel()), inputs, strict=True):
                part.copy_(tensor.reshape(-1))


@supplies("_nccl_reduce_scatter")
def reduce_scatter(
    scope: Scope, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], op: int = 0, *rest: Any
) -> None:
    """Reduce the inputs and put a part of the result into each output."""
    with torch.no_grad():
        for output, part in zip(outputs, reduced(inputs, op).view(-1).split(outputs[0].numel()), strict=True):
            output.copy_(part.view_as(output))


def _place(scope: Scope, index: int) -> torch.device:
    return torch.device("cpu") if index < 0 else scope.device(index)


@supplies("_broadcast")
def comm_broadcast(scope: Scope, tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """The tensor itself on the first device, copies on the others."""
    return [tensor.to(_place(scope, device), copy=bool(i)) for i, device in enumerate(devices)]


@supplies("_broadcast_out")
def comm_broadcast_out(scope: Scope, tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the tensor into each of ``out``."""
    return [each.copy_(tensor) for each in out]


@supplies("_broadcast_coalesced")
def comm_broadcast_coalesced(
    scope: Scope, tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    """For each device, all tensors; the tensors themselves on the first."""
    return [[tensor.to(_place(scope, device), copy=bool(i)) for tensor in tensors] for i, device in enumerate(devices)]


@supplies("_scatter")
def comm_scatter(
    scope: Scope,
    tensor: torch.Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Any = None,
) -> list[torch.Tensor]:
    """A chunk of the tensor on each device."""
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim)
    return [chunk.to(_place(scope, device)) for chunk, device in zip(chunks, devices, strict=False)]


@supplies("_scatter_out")
def comm_scatter_out(
    scope: Scope, tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int, streams: Any = None
) -> list[torch.Tensor]:
    """Copy a chunk of the tensor into each of ``out``."""
    chunks = tensor.split([each.size(dim) for each in out], dim)
    return [each.copy_(chunk) for each, chunk in zip(out, chunks, strict=True)]


@supplies("_gather")
def comm_gather(
    scope: Scope, tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None
) -> torch.Tensor:
    """The tensors as one, on the destination, the current device if None."""
    device = _place(scope, scope.thread.device_index if destination is None else destination)
    return torch.cat([tensor.to(device) for tensor in tensors], dim)


@supplies("_gather_out")
def comm_gather_out(scope: Scope, tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int) -> torch.Tensor:
    """Copy the tensors into the parts of ``out``."""
    for part, tensor in zip(out.split([each.size(dim) for each in tensors], dim), tensors, strict=True):
        part.copy_(tensor)
    return out
