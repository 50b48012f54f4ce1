"""Memory figures and limits. For ``torch/cuda/memory.py``.

The figures are the runtime's. Where those are not an allocator's own (CPU, MPS) each call site is reported as
approximate; what a runtime cannot know, such as the number of allocations, is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.cuda.comm
import torch.cuda.green_contexts

from torchdevice.context import Context
from torchdevice.devices.runtime import MEMORY_FRACTION
from torchdevice.fidelity import Fidelity
from torchdevice.patching import Patch, replaced_function, replaced_in_importers
from torchdevice.spelling import Spelling
from torchdevice.supplied import supplied_function

_BYTES = ("active_bytes", "allocated_bytes", "inactive_split_bytes", "requested_bytes", "reserved_bytes")


_COUNTS = ("active", "allocation", "inactive_split", "segment")


_POOLS = ("all", "large_pool", "small_pool")


_SCALARS = (
    "max_split_size",
    "num_alloc_retries",
    "num_device_alloc",
    "num_device_free",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
)


_OVERSIZE = ("oversize_allocations", "oversize_segments")


APPROXIMATE_FIGURES = {
    "cpu": (Fidelity.APPROXIMATE, "The process's heap; counts of allocations are 0."),
    "mps": (Fidelity.APPROXIMATE, "MPS's figures; the peak is the largest seen, counts of allocations are 0."),
}
"""What figures are on targets whose allocator keeps none."""


LIMITS = {
    "cpu": (Fidelity.APPROXIMATE, "Stored; allocations are not limited."),
    "mps": (Fidelity.EXACT, "The limit of MPS's own allocator."),
}
"""What a limit is on targets other than simulated ones."""


def _zeros() -> dict[str, int]:
    return {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


def _figures(current: int, peak: int) -> dict[str, int]:
    return {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}


def _target_index(context: Context, device: int) -> int:
    if not context.accepts(device):
        raise RuntimeError(f"Invalid device argument {device}: did you call init?")  # CUDACachingAllocator.cpp
    return context.device(device).index or 0


def report(context: Context, name: str) -> None:
    if not context.runtime.exact_memory:
        context.report(name, f"figures of the {context.device_type} process", Fidelity.APPROXIMATE)


@supplied_function("_cuda_memoryStats", on=APPROXIMATE_FIGURES)
def memory_stats(context: Context, device: int) -> dict[str, Any]:
    """The runtime's figures under CUDA's keys; unknown ones are 0."""
    report(context, "torch.cuda.memory_stats")
    index = _target_index(context, device)
    memory = context.runtime.memory(index)
    stats: dict[str, Any] = {name: {pool: _zeros() for pool in _POOLS} for name in (*_BYTES, *_COUNTS)}
    allocated = _figures(memory.allocated, memory.peak_allocated)
    for name in ("active_bytes", "allocated_bytes", "requested_bytes"):
        stats[name]["all"] = dict(allocated)
    stats["reserved_bytes"]["all"] = _figures(memory.reserved, memory.peak_reserved)
    stats.update({name: _zeros() for name in _OVERSIZE}, **dict.fromkeys(_SCALARS, 0))
    for name, kept in context.runtime.statistics(index).items():
        stats[name] = kept if isinstance(kept, int) else {pool: stat._asdict() for pool, stat in kept.items()}
    return stats


@supplied_function("_cuda_resetPeakMemoryStats")
def reset_peak_memory_stats(context: Context, device: int) -> None:
    """Let the peaks start at the present figures."""
    context.runtime.reset_peak_memory(_target_index(context, device))


@supplied_function("_cuda_resetAccumulatedMemoryStats")
def reset_accumulated_memory_stats(context: Context, device: int) -> None:
    """Let the sums start at 0, where the target keeps any."""
    context.runtime.reset_accumulated_memory(_target_index(context, device))


@supplied_function("_cuda_hostMemoryStats")
def host_memory_stats(context: Context) -> dict[str, Any]:
    """Zeros: no page-locked host memory is allocated."""
    names = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
    times = {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0}
    counters = {"num_host_alloc": 0, "num_host_free": 0}
    return {
        **{name: _zeros() for name in names},
        **counters,
        "host_alloc_time": dict(times),
        "host_free_time": dict(times),
    }


@supplied_function("_cuda_resetPeakHostMemoryStats")
def reset_peak_host_memory_stats(context: Context) -> None:
    """Nothing to reset: the figures are 0."""


@supplied_function("_cuda_resetAccumulatedHostMemoryStats")
def reset_accumulated_host_memory_stats(context: Context) -> None:
    """Nothing to reset: the figures are 0."""


@supplied_function("_cuda_emptyCache")
def empty_cache(context: Context) -> None:
    """Give the target's unused memory back."""
    context.runtime.empty_cache()


@supplied_function("_cuda_setMemoryFraction", on=LIMITS)
def set_memory_fraction(context: Context, fraction: float | None, device: int) -> None:
    """The limit on simulated devices; elsewhere stored, and allocations are not limited."""
    if not context.runtime.limit_memory(_target_index(context, device), fraction):
        context.report("torch.cuda.set_per_process_memory_fraction", "stored, no limit", Fidelity.APPROXIMATE)
    context.settings[MEMORY_FRACTION, device] = fraction


@supplied_function("_cuda_getMemoryFraction")
def get_memory_fraction(context: Context, device: int) -> float:
    """The fraction that was set, 1.0 before."""
    return context.settings.get((MEMORY_FRACTION, device), 1.0)


@supplied_function("_cuda_getAllocatorBackend")
def get_allocator_backend(context: Context) -> str:
    """The name of CUDA's default allocator."""
    return "native"


def total(context: Context, device: int) -> int:
    """Return the bytes of memory of a device, as the scope's properties say or the target has them."""
    return (context.options.properties or {}).get("total_memory") or context.runtime.total_memory(
        _target_index(context, device)
    )


def mem_get_info(context: Context, device: int) -> tuple[int, int]:
    """Return free and total bytes of a device, for ``cudaMemGetInfo``."""
    device = context.ordinal(Spelling("cuda", device))
    size = total(context, device)
    return min(context.runtime.free_memory(_target_index(context, device)), size), size


def list_processes(context: Context, device: int) -> str:
    """Return the processes known to use a device, as ``torch.cuda.list_gpu_processes`` prints them."""
    processes = context.runtime.processes(_target_index(context, device))
    lines = [f"process {pid:>10d} uses {size / 2**20:>12.3f} MB GPU memory" for pid, size in processes]
    return "\n".join([f"GPU:{device}", *lines])


def _list_gpu_processes(context: Context, original: Any, device: Any = None) -> str:
    return list_processes(context, torch.cuda._utils._get_device_index(device, optional=True))


def _device_memory_used(context: Context, original: Any, device: Any = None) -> int:
    index = torch.cuda._utils._get_device_index(device, optional=True)
    report(context, "torch.cuda.device_memory_used")
    return context.runtime.memory(context.device(index).index or 0).reserved


def patches() -> list[Patch]:
    """Return the patches of what asks NVIDIA's management library for memory."""
    return [
        replaced_in_importers(torch.cuda.memory, "list_gpu_processes", _list_gpu_processes, native_to="cuda"),
        replaced_function(torch.cuda, "device_memory_used", _device_memory_used, native_to="cuda"),
    ]
