"""Memory figures, limits and pools, for ``torch/cuda/memory.py``.

The target's runtime measures the figures. Where they are not an allocator's own (CPU, MPS), each
line of the program that asks for them is reported as approximate. A figure that a runtime cannot
measure, such as the number of allocations, is 0. Simulated devices have pools; on other targets
they raise.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdevice.calls.error_texts import class_for_out_of_memory
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import (
    imported_by_value,
    replaces,
    supplied_function,
    supplied_value,
)
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_memory import PoolId, PrivatePools, Stat, new_id
from torchdevice.kernel.devices.device_strings import Spelling
from torchdevice.kernel.devices.runtime import MEMORY_FRACTION
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.python import allocator_texts
from torchdevice.kernel.stand_ins import refuse_to_pickle
from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.torch_modules.cuda.unsupported_names import POOL

POOLS = ("all", "large_pool", "small_pool")

_OF_POOLS = (
    "active_bytes",
    "allocated_bytes",
    "inactive_split_bytes",
    "requested_bytes",
    "reserved_bytes",
    "active",
    "allocation",
    "inactive_split",
    "segment",
)
"""Keys of ``torch.cuda.memory_stats`` that have figures for each pool."""

_OF_THE_WHOLE = ("oversize_allocations", "oversize_segments")
"""Keys that have figures for the whole allocator."""

_NUMBERS = (
    "max_split_size",
    "num_alloc_retries",
    "num_device_alloc",
    "num_device_free",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
)
"""Keys that have one number."""

SNAPSHOT_SETTINGS: Mapping[str, Any] = {
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "roundup_power2_divisions": {},
}
"""The settings that a snapshot shows."""

APPROXIMATE_FIGURES = {
    "cpu": (Fidelity.APPROXIMATE, "Figures of the process's heap. Counts of allocations are 0."),
    "mps": (
        Fidelity.APPROXIMATE,
        "MPS's figures. The peak is the largest figure read, counts of allocations are 0.",
    ),
}
"""The fidelity of memory figures on targets whose allocator keeps none."""


LIMITS = {
    "cpu": (Fidelity.APPROXIMATE, "Stores the limit. Allocations are not limited."),
    "mps": (Fidelity.EXACT, "Sets the limit of MPS's own allocator."),
}
"""The fidelity of a memory limit on targets other than simulated ones."""


NO_SETTINGS = dict.fromkeys(
    ("cpu", "mps"), (Fidelity.INERT, "Checks the settings, which have no effect.")
)
"""The fidelity of settings of the allocator on targets that have another."""


@supplied_value("torch.cuda.OutOfMemoryError")
def out_of_memory_error(context: Context) -> type[RuntimeError]:
    """Return the class of CUDA's out-of-memory errors, which also catches the target's own."""
    return class_for_out_of_memory(context, sys.exc_info()[1])


def _figures(current: int = 0, peak: int = 0) -> dict[str, int]:
    """Return the figures of a key. Sums of allocations are the least that explain the peak."""
    return {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}


def _target_index(context: Context, device: int) -> int:
    if not context.devices.accepts(device):
        # CUDACachingAllocator.cpp.
        raise RuntimeError(f"Invalid device argument {device}: did you call init?")
    return context.devices.target_index(device)


def report(context: Context, name: str, told: str = "figures of the {} process") -> None:
    """Report a memory figure as approximate where it is not the allocator's own."""
    if not context.runtime.exact_memory:
        context.report(name, told.format(context.names.family), Fidelity.APPROXIMATE)


@supplied_function("_cuda_memoryStats", on=APPROXIMATE_FIGURES)
def memory_stats(context: Context, device: int) -> dict[str, Any]:
    """Return the runtime's figures under CUDA's keys; 0 for those that it cannot measure."""
    report(context, "torch.cuda.memory_stats")
    index = _target_index(context, device)
    memory = context.runtime.memory(index)
    stats: dict[str, Any] = {name: {pool: _figures() for pool in POOLS} for name in _OF_POOLS}
    allocated = _figures(memory.allocated, memory.peak_allocated)
    for name in ("active_bytes", "allocated_bytes", "requested_bytes"):
        stats[name]["all"] = dict(allocated)
    stats["reserved_bytes"]["all"] = _figures(memory.reserved, memory.peak_reserved)
    stats.update({name: _figures() for name in _OF_THE_WHOLE}, **dict.fromkeys(_NUMBERS, 0))
    for name, kept in context.runtime.supplied.statistics(index).items():
        stats[name] = _shown(kept)
    return stats


def _shown(kept: Any) -> Any:
    if isinstance(kept, Stat):
        return kept._asdict()
    return kept if isinstance(kept, int) else {pool: stat._asdict() for pool, stat in kept.items()}


@supplied_function("_cuda_resetPeakMemoryStats")
def reset_peak_memory_stats(context: Context, device: int) -> None:
    """Set the peaks to the present figures."""
    context.runtime.reset_peak_memory(_target_index(context, device))


@supplied_function("_cuda_resetAccumulatedMemoryStats")
def reset_accumulated_memory_stats(context: Context, device: int) -> None:
    """Set the sums of allocations to 0, where the target keeps such sums."""
    context.runtime.supplied.reset_accumulated_memory(_target_index(context, device))


@supplied_function("_cuda_emptyCache")
def empty_cache(context: Context) -> None:
    """Release the target's unused cached memory."""
    context.runtime.empty_cache()


@supplied_function("_accelerator_setAllocatorSettings", on=NO_SETTINGS)
def set_allocator_settings(context: Context, env: str) -> None:
    """Change a simulated allocator's settings. On other targets torch only checks them."""
    if not context.runtime.supplied.set_allocator(env):
        context.report(
            "torch.cuda.memory._set_allocator_settings", "checked, not used", Fidelity.INERT
        )
        with thread_state.suspended():
            allocator_texts.parse(env)


@supplied_function("_cuda_setMemoryFraction", on=LIMITS)
def set_memory_fraction(context: Context, fraction: float | None, device: int) -> None:
    """Limit the memory of a simulated device or of MPS; other targets only store the fraction."""
    if not context.runtime.limit_memory(_target_index(context, device), fraction):
        context.report(
            "torch.cuda.set_per_process_memory_fraction", "stored, no limit", Fidelity.APPROXIMATE
        )
    context.settings[MEMORY_FRACTION, device] = fraction


@supplied_function("_cuda_getMemoryFraction")
def get_memory_fraction(context: Context, device: int) -> float:
    """Return the fraction that was set, or 1.0 if none was."""
    return context.settings.get((MEMORY_FRACTION, device), 1.0)


def total(context: Context, device: int) -> int:
    """Return a device's memory in bytes: the property ``total_memory``, or the target's memory."""
    given = (context.devices.figure("properties", device) or {}).get("total_memory")
    return given or context.runtime.total_memory(_target_index(context, device))


def mem_get_info(context: Context, device: int) -> tuple[int, int]:
    """Return the free and the total bytes of a device, for ``cudaMemGetInfo``."""
    device = context.devices.ordinal(Spelling("cuda", device))
    size = total(context, device)
    return min(context.runtime.free_memory(_target_index(context, device)), size), size


def _figure(field: str) -> Callable[..., int]:
    """Return the replacement of a function with one figure; torch's makes a table of them all."""

    def read(context: Context, original: Any, device: Any = None) -> int:
        # As in torch, which takes CUDA for not initialised there. The cheap comparison comes first.
        if context.driver.user != os.getpid() and context.driver.is_in_bad_fork:
            return 0
        if not context.runtime.exact_memory:
            report(context, "torch.cuda.memory_stats")
        if device is None:
            index = context.devices.target_index(context.thread.device_index)
        else:
            index = _target_index(
                context, torch.cuda._utils._get_device_index(device, optional=True)
            )
        return getattr(context.runtime.memory(index), field)

    return read


for _field in ("allocated", "reserved"):
    replaces(torch.cuda.memory, f"memory_{_field}", by_value=True)(_figure(_field))
    replaces(torch.cuda.memory, f"max_memory_{_field}", by_value=True)(_figure(f"peak_{_field}"))


NO_POOLS = dict.fromkeys(("cpu", "mps"), (Fidelity.UNSUPPORTED, POOL))
"""The fidelity of memory pools on targets that have another allocator."""


class MemPoolStandIn:
    """Stands in for ``torch.cuda.MemPool``: a private pool of a device."""

    __reduce_ex__ = refuse_to_pickle

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
        return (
            f"<{self.__class__.__module__}.{self.__class__.__qualname__} object at {id(self):#x}>"
        )

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
    found = context.runtime.supplied.private_pools(context.devices.target_index(device))
    if found is not None:
        return found
    return thread_state.refuse(f"torch.{context.program}.MemPool", POOL)


@replaces(torch.cuda.MemPool, "__new__")
def new_pool(
    context: Context,
    original: Any,
    cls: type,
    allocator: Any = None,
    use_on_oom: bool = False,
    no_split: bool = False,
) -> MemPoolStandIn:
    """``MemPool``: a new pool of the current device, by the rules of the device's allocator."""
    pools = _pools(context, context.thread.device_index)
    unsupported = {"allocator": allocator, "use_on_oom": use_on_oom, "no_split": no_split}
    for name, given in unsupported.items():
        if given:
            thread_state.refuse(
                f"torch.{context.program}.MemPool({name}={given!r})", "Leave the argument out."
            )
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
def begin_allocate_current_thread_to_pool(
    context: Context, device: int, mempool_id: PoolId
) -> None:
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


@supplied_function("_cuda_getCheckpointState", on=NO_POOLS)
def checkpoint_state(context: Context, device: int, id: PoolId) -> tuple[PoolId, Any]:
    """Return how the segments of a pool are divided."""
    return id, _pools(context, device).checkpoint(id)


@supplied_function("_cuda_setCheckpointPoolState", on=NO_POOLS)
def set_checkpoint_pool_state(
    context: Context,
    device: int,
    state: tuple[PoolId, Any],
    stale_storages: list[int],
    storages: list[int],
) -> None:
    """Divide a pool's segments as they were. Blocks without a tensor are freed by address."""
    if storages:
        thread_state.refuse(
            "torch._C._cuda_setCheckpointPoolState(storages)", "Give no storages that get blocks."
        )
    pools = _pools(context, device)
    stale = {torch.UntypedStorage._new_with_weak_ptr(each).data_ptr() for each in stale_storages}
    for address, block in pools.restore(*state, stale).items():
        _raw(context)[address] = functools.partial(pools.freed.append, block)


@supplied_function("_cuda_checkPoolLiveAllocations", on=NO_POOLS)
def check_pool_live_allocations(
    context: Context, device: int, pool: PoolId, ptrs: set[int]
) -> bool:
    """Return whether the tensors in a pool have these addresses, and no others."""
    return bool(_pools(context, device).live_in(pool) == {*ptrs})


def _raw(context: Context) -> dict[int, Callable[[], object]]:
    """Return the functions that free raw memory, by its address."""
    return context.settings.setdefault(_raw, {})  # type: ignore[no-any-return]


BUFFERS = {
    "mps": (
        Fidelity.APPROXIMATE,
        "The address names a buffer of Metal, which other code cannot read by it.",
    )
}


@supplied_function("_cuda_cudaCachingAllocator_raw_alloc", on=BUFFERS)
def raw_alloc(context: Context, size: int, cuda_stream: int) -> int:
    """Return the address of new memory, by the current stream of the device."""
    _report_buffer(context, "torch.cuda.caching_allocator_alloc")
    device = context.runtime.device(context.devices.target_index(context.thread.device_index))
    memory = [torch.empty(size, dtype=torch.uint8, device=device)]
    _raw(context)[data_ptr(memory[0])] = memory.clear
    return data_ptr(memory[0])


@supplied_function("_cuda_cudaCachingAllocator_raw_delete", on=BUFFERS)
def raw_delete(context: Context, mem_ptr: int) -> None:
    """Free memory by its address."""
    _report_buffer(context, "torch.cuda.caching_allocator_delete")
    if mem_ptr not in _raw(context):
        raise RuntimeError(f"invalid device pointer: {mem_ptr:#x}")  # CUDACachingAllocator.cpp
    _raw(context).pop(mem_ptr)()


def _report_buffer(context: Context, name: str) -> None:
    if not context.runtime.support.has_addresses:
        context.report(name, "the address names a buffer of Metal", Fidelity.APPROXIMATE)


_BY_VALUE = (
    "_cuda_beginAllocateCurrentThreadToPool _cuda_beginAllocateToPool _cuda_endAllocateToPool "
    "_cuda_releasePool"
)

imported_by_value(torch.cuda.memory, _BY_VALUE)
