"""``torch.utils.viz._cycles``, which shows cycles of references with tensors, and where the tensors were allocated.

It looks for a tensor's address among the blocks of a snapshot. The blocks of a simulated device have the addresses that
its allocator gave them, so here it finds a block by the address of the values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchdevice.core.context import Context
from torchdevice.core.replacing import replaces
from torchdevice.engines.rewriters import native_device

_MODULE = "torch.utils.viz._cycles"


@replaces(_MODULE, "is_cuda_tensor", sees_scope=True)
def _is_on_accelerator(context: Context, original: Any, value: Any) -> bool:
    """``is_cuda_tensor``, for the target's tensors too, where these are not the CPU's."""
    if original(value):
        return True
    if context.runtime.shares_host_memory or not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return False
    return native_device(value).type == context.device_type


@replaces(_MODULE, "cuda_allocation_context", sees_scope=True)
def _allocation_context(context: Context, original: Any) -> Callable[[Any], str | None]:
    """Return what returns the lines that allocated a tensor, None where unknown."""
    module: Any = sys.modules[_MODULE]
    blocks = {
        block.get("data_ptr", block["address"]): block
        for segment in torch.cuda.memory._snapshot()["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }

    def of(value: Any) -> str | None:
        block = blocks.get(value.untyped_storage().data_ptr()) if module.is_cuda_tensor(value) else None
        frames = module._block_extra(block)[0] if block is not None else None
        return "\n".join(module._frames_fmt(frames, full_filename=True)) if frames else None

    return of
