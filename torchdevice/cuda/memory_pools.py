"""Memory pools, for ``torch/cuda/memory.py``. Simulated devices have them; on other targets they raise."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.cuda.unsupported import POOL
from torchdevice.devices.private_pools import PoolId, PrivatePools, new_id
from torchdevice.fidelity import Fidelity
from torchdevice.patching import Patch, replaced_function
from torchdevice.supplied import supplied_function

NO_POOLS = dict.fromkeys(("cpu", "mps"), (Fidelity.UNSUPPORTED, POOL))
"""The fidelity of memory pools on targets that have another allocator."""

_NAME = "torch.cuda.MemPool"


class MemPoolStandIn:
    """Stands in for ``torch.cuda.MemPool``: a private pool of a device."""

    # isinstance(pool, torch.cuda.MemPool) holds.
    __class__ = property(lambda self: torch.cuda.MemPool)  # type: ignore[assignment]

    allocator = None

    def __init__(self, pools: PrivatePools, *, serves_all: bool, splits: bool):
        self.id = new_id()
        self._pools = pools
        pools.keep_private(self.id, serves_all=serves_all, splits=splits)
        weakref.finalize(self, _end, pools, self.id).atexit = False

    def use_count(self) -> int:
        """Return how many objects and routes keep the pool."""
        return self._pools.uses_of(self.id)

    def snapshot(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pool's segments."""
        return torch.cuda.MemPool.snapshot(self, *args, **kwargs)  # type: ignore[arg-type]


def _end(pools: PrivatePools, owner: PoolId) -> None:
    pools.release_private(owner)
    pools.empty_private(owner)


def _pools(context: Context, device: int) -> PrivatePools:
    found = context.runtime.private_pools(context.device(device).index or 0)
    return found if found is not None else thread_state.refuse(_NAME, POOL)


def _new_pool(
    context: Context,
    original: Any,
    cls: type,
    allocator: Any = None,
    use_on_oom: bool = False,
    no_split: bool = False,
) -> MemPoolStandIn:
    if allocator is not None:
        thread_state.refuse(_NAME, POOL)
    pools = _pools(context, context.thread.device_index)
    return MemPoolStandIn(pools, serves_all=use_on_oom, splits=not no_split)


def _begin(context: Context, device: int, owner: PoolId, takes: Callable[[], bool]) -> None:
    pools = _pools(context, device)
    pools.keep_private(owner)
    pools.route(owner, takes)


@supplied_function("_cuda_beginAllocateToPool", on=NO_POOLS)
def begin_allocate_to_pool(context: Context, device: int, mempool_id: PoolId) -> None:
    """Serve all allocations on a device from a pool."""
    _begin(context, device, mempool_id, lambda: True)


@supplied_function("_cuda_beginAllocateCurrentThreadToPool", on=NO_POOLS)
def begin_allocate_current_thread_to_pool(context: Context, device: int, mempool_id: PoolId) -> None:
    """Serve this thread's allocations on a device from a pool."""
    thread = threading.get_ident()
    _begin(context, device, mempool_id, lambda: threading.get_ident() == thread)


@supplied_function("_cuda_beginAllocateCurrentStreamToPool", on=NO_POOLS)
def begin_allocate_current_stream_to_pool(context: Context, device: int, mempool_id: PoolId) -> None:
    """Serve the allocations on this thread's current stream of a device from a pool."""
    index = context.device(device).index or 0
    stream = context.thread.streams.get(index, 0)
    _begin(context, device, mempool_id, lambda: context.thread.streams.get(index, 0) == stream)


@supplied_function("_cuda_endAllocateToPool", on=NO_POOLS)
def end_allocate_to_pool(context: Context, device: int, mempool_id: PoolId) -> None:
    """Serve allocations from a pool no more."""
    _pools(context, device).unroute(mempool_id)


@supplied_function("_cuda_releasePool", on=NO_POOLS)
def release_pool(context: Context, device: int, mempool_id: PoolId) -> None:
    """Count one use of a pool less."""
    _pools(context, device).release_private(mempool_id)


def _no_allocator(context: Context, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    thread_state.refuse("torch.cuda.memory.CUDAPluggableAllocator", POOL)


_BY_VALUE = {
    "_cuda_beginAllocateCurrentThreadToPool": begin_allocate_current_thread_to_pool,
    "_cuda_beginAllocateToPool": begin_allocate_to_pool,
    "_cuda_endAllocateToPool": end_allocate_to_pool,
    "_cuda_releasePool": release_pool,
}
"""The functions of pools that ``torch.cuda.memory`` imports from ``torch._C`` by value."""


def _without_original(function: Callable[..., None]) -> Callable[..., None]:
    return lambda context, original, *args: function(context, *args)


def patches() -> list[Patch]:
    """Return the patches of pools and allocators."""
    return [
        replaced_function(torch.cuda.MemPool, "__new__", _new_pool, native_to="cuda"),
        replaced_function(torch.cuda.memory.CUDAPluggableAllocator, "__init__", _no_allocator, native_to="cuda"),
        *(
            replaced_function(torch.cuda.memory, name, _without_original(function), native_to="cuda")
            for name, function in _BY_VALUE.items()
        ),
    ]
