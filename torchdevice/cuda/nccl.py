"""Collectives between the devices of one process, for ``torch/cuda/nccl.py``.

torch's own operators move and reduce the tensors in the order of the devices, so that sums are reproducible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchdevice.core.bindings import supplied_function
from torchdevice.core.context import Context
from torchdevice.foundation.fidelity import Fidelity

_REDUCTIONS: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    0: torch.add,
    1: torch.mul,
    2: torch.maximum,
    3: torch.minimum,
}
"""``ncclRedOp_t`` of nccl.h: sum, product, maximum, minimum."""


def reduced(inputs: Sequence[torch.Tensor], op: int = 0) -> torch.Tensor:
    """Return the reduction of tensors on the device of the first; ``op`` is an ``ncclRedOp_t``.

    Raises:
        RuntimeError: ``op`` is not an NCCL reduction.
    """
    if op not in _REDUCTIONS:
        raise RuntimeError(f"op={op!r} is not an NCCL reduction. Use 0 (sum), 1 (product), 2 (maximum) or 3 (minimum).")
    return functools.reduce(lambda a, b: _REDUCTIONS[op](a, b.to(a.device)), inputs)


@supplied_function("_nccl_all_reduce")
def all_reduce(
    context: Context, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], op: int = 0, *rest: Any
) -> None:
    """Reduce the inputs into every output."""
    total = reduced(inputs, op)
    with torch.no_grad():
        for output in outputs:
            output.copy_(total)


@supplied_function("_nccl_reduce")
def reduce(
    context: Context, inputs: Sequence[torch.Tensor], output: torch.Tensor, root: int = 0, op: int = 0, *rest: Any
) -> None:
    """Reduce the inputs into the output."""
    with torch.no_grad():
        output.copy_(reduced(inputs, op))


@supplied_function("_nccl_broadcast")
def broadcast(context: Context, inputs: Sequence[torch.Tensor], root: int = 0, *rest: Any) -> None:
    """Copy ``inputs[root]`` into the other inputs."""
    with torch.no_grad():
        for index, tensor in enumerate(inputs):
            if index != root:
                tensor.copy_(inputs[root])


@supplied_function("_nccl_all_gather")
def all_gather(context: Context, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *rest: Any) -> None:
    """Concatenate the inputs, flattened, in every output."""
    with torch.no_grad():
        for output in outputs:
            for part, tensor in zip(output.view(-1).split(inputs[0].numel()), inputs, strict=True):
                part.copy_(tensor.reshape(-1))


@supplied_function("_nccl_reduce_scatter")
def reduce_scatter(
    context: Context, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], op: int = 0, *rest: Any
) -> None:
    """Reduce the inputs and copy one part of the result into each output."""
    with torch.no_grad():
        for output, part in zip(outputs, reduced(inputs, op).view(-1).split(outputs[0].numel()), strict=True):
            output.copy_(part.view_as(output))


NCCL = 2 << 32 | 27 << 16 | 3
"""NCCL 2.27.3 as ``_nccl_version`` packs it: major, minor and patch, the latter two in 16 bits each."""


@supplied_function("_nccl_version", Fidelity.DECLARED)
def nccl_version(context: Context) -> int:
    """Return NCCL 2.27.3 as one packed number."""
    return NCCL


@supplied_function("_nccl_version_suffix", Fidelity.DECLARED)
def nccl_version_suffix(context: Context) -> bytes:
    """Return an empty suffix."""
    return b""
