"""Memory pools and pluggable allocators, which are refused, for ``torch/cuda/memory.py``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.cuda.unsupported import POOL
from torchdevice.patching import Patch, replaced_function


def _no_pool(context: Context, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    thread_state.refuse("torch.cuda.MemPool", POOL)


def _no_allocator(context: Context, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    thread_state.refuse("torch.cuda.memory.CUDAPluggableAllocator", POOL)


_BY_VALUE = (
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_beginAllocateToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
)
"""The functions of pools that ``torch.cuda.memory`` imports from ``torch._C`` by value."""


def patches() -> list[Patch]:
    """Return the patches of pools and allocators."""
    return [
        replaced_function(torch.cuda.MemPool, "__new__", _no_pool, native_to="cuda"),
        replaced_function(torch.cuda.memory.CUDAPluggableAllocator, "__init__", _no_allocator, native_to="cuda"),
        *(replaced_function(torch.cuda.memory, name, _no_pool, native_to="cuda") for name in _BY_VALUE),
    ]
