"""Kernels of the simulated device for the parts of batch normalisation that ``SyncBatchNorm`` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation.allocator.storages import fresh
from torchdevice.simulation.kernels.cpu_kernels import aliased, index_of, without_mode
from torchdevice.torch_apis import batch_norm


def _on_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel for tensors of the device that computes with CPU tensors in their memory."""

    def run(*args: Any) -> Any:
        index = index_of(args[0])
        taken = [aliased(each) if isinstance(each, torch.Tensor) else each for each in args]
        result = kernel(*taken)
        if isinstance(result, torch.Tensor):
            return fresh(result, index)
        return tuple(each if each is None else fresh(each, index) for each in result)

    return without_mode(run)


KERNELS = {name: _on_device(kernel) for name, kernel in batch_norm.KERNELS.items()}
"""Kernels by the names of their operators."""
