"""Memory pools, for ``torch/cuda/memory.py``. Simulated devices have them; on other targets they raise."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.core import Context, replaces, supplied_function, thread_state
from torchdevice.core.bindings import imported_by_value
from torchdevice.cuda.unsupported import POOL
from torchdevice.devices.device_memory import PoolId, PrivatePools, new_id
from torchdevice.foundation.fidelity import Fidelity

NO_POOLS = dict.fromkeys(("cpu", "mps"), (Fidelity.UNSUPPORTED, POOL))
"""The fidelity of memory pools on targets that have another allocator."""


class MemPoolStandIn:
    """Stands in for ``torch.cuda.MemPool``: a private pool of a device."""

    # isinstance(pool, torch.cuda.MemPool) holds.
    __class__ = property(lambda self: self.module.MemPool)  # type: ignore[assignment]

    allocator = None

    def __init__(self, module: Any, pools: PrivatePools):
        self.module = module
        self.id = new_id()
        self._pools = pools
        pools.keep_private(self.id)
        weakref.finalize(self, _end, pools, self.id).atexit = False

    def __repr__(self) -> str:
        return f"<{self.__class__.__module__}.{self.__class__.__qualname__} object at {id(self):#x}>"

    def use_count(self) -> int:
        """Return how many objects and routes keep the pool."""
        return self._pools.uses_of(self.id)

    def snapshot(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pool's segments."""
        return self.module.MemPool.snapshot(self, *args, **kwargs)


def _end(pools: PrivatePools, owner: PoolId) -> None:
    pools.release_private(owner)
    pools.empty_private(owner)


def _pools(context: Context, device: int) -> PrivatePools:
    found = context.runtime.private_pools(context.target_index(device))
    return found if found is not None else thread_state.refuse(f"torch.{context.program}.MemPool", POOL)


@replaces(torch.cuda.MemPool, "__new__")
def new_pool(
    context: Context, original: Any, cls: type, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False
) -> MemPoolStandIn:
    """``MemPool``: a new pool of the current device, by the rules of the device's allocator."""
    pools = _pools(context, context.thread.device_index)
    for name, given in {"allocator": allocator, "use_on_oom": use_on_oom, "no_split": no_split}.items():
        if given:
            thread_state.refuse(f"torch.{context.program}.MemPool({name}={given!r})", "Leave the argument out.")
    return MemPoolStandIn(getattr(torch, context.program), pools)


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


@supplied_function("_cuda_endAllocateToPool", on=NO_POOLS)
def end_allocate_to_pool(context: Context, device: int, mempool_id: PoolId) -> None:
    """Serve allocations from a pool no more."""
    _pools(context, device).unroute(mempool_id)


@supplied_function("_cuda_releasePool", on=NO_POOLS)
def release_pool(context: Context, device: int, mempool_id: PoolId) -> None:
    """Count one use of a pool less."""
    _pools(context, device).release_private(mempool_id)


_BY_VALUE = "_cuda_beginAllocateCurrentThreadToPool _cuda_beginAllocateToPool _cuda_endAllocateToPool _cuda_releasePool"

imported_by_value(torch.cuda.memory, _BY_VALUE)
