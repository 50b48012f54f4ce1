"""Memory figures and limits. For ``torch/cuda/memory.py``.

The figures are the runtime's. Where those are not an allocator's own (CPU, MPS) each call site is reported as
approximate; what a runtime cannot know, such as the number of allocations, is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdevice._journal import Fidelity
from torchdevice._runtimes import MEMORY_FRACTION
from torchdevice._spelling import Spelling
from torchdevice.bindings import supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope

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


def _target_index(scope: Scope, device: int) -> int:
    if not scope.accepts(device):
        raise RuntimeError(f"Invalid device argument {device}: did you call init?")  # CUDACachingAllocator.cpp
    return scope.device(device).index or 0


def report(scope: Scope, name: str) -> None:
    if not scope.runtime.exact_memory:
        scope.report(name, f"figures of the {scope.runtime.kind} process", Fidelity.APPROXIMATE)


@supplies("_cuda_memoryStats", on=APPROXIMATE_FIGURES)
def memory_stats(scope: Scope, device: int) -> dict[str, Any]:
    """The runtime's figures under CUDA's keys; unknown ones are 0."""
    report(scope, "torch.cuda.memory_stats")
    index = _target_index(scope, device)
    memory = scope.runtime.memory(index)
    stats: dict[str, Any] = {name: {pool: _zeros() for pool in _POOLS} for name in (*_BYTES, *_COUNTS)}
    allocated = _figures(memory.allocated, memory.peak_allocated)
    for name in ("active_bytes", "allocated_bytes", "requested_bytes"):
        stats[name]["all"] = dict(allocated)
    stats["reserved_bytes"]["all"] = _figures(memory.reserved, memory.peak_reserved)
    stats.update({name: _zeros() for name in _OVERSIZE}, **dict.fromkeys(_SCALARS, 0))
    for name, kept in scope.runtime.statistics(index).items():
        stats[name] = kept if isinstance(kept, int) else {pool: stat._asdict() for pool, stat in kept.items()}
    return stats


@supplies("_cuda_resetPeakMemoryStats")
def reset_peak_memory_stats(scope: Scope, device: int) -> None:
    """Let the peaks start at the present figures."""
    scope.runtime.reset_peak_memory(_target_index(scope, device))


@supplies("_cuda_resetAccumulatedMemoryStats")
def reset_accumulated_memory_stats(scope: Scope, device: int) -> None:
    """Let the sums start at 0, where the target keeps any."""
    scope.runtime.reset_accumulated_memory(_target_index(scope, device))


@supplies("_cuda_hostMemoryStats")
def host_memory_stats(scope: Scope) -> dict[str, Any]:
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


@supplies("_cuda_resetPeakHostMemoryStats")
def reset_peak_host_memory_stats(scope: Scope) -> None:
    """Nothing to reset: the figures are 0."""


@supplies("_cuda_resetAccumulatedHostMemoryStats")
def reset_accumulated_host_memory_stats(scope: Scope) -> None:
    """Nothing to reset: the figures are 0."""


@supplies("_cuda_emptyCache")
def empty_cache(scope: Scope) -> None:
    """Give the target's unused memory back."""
    scope.runtime.empty_cache()


@supplies("_cuda_setMemoryFraction", on=LIMITS)
def set_memory_fraction(scope: Scope, fraction: float | None, device: int) -> None:
    """The limit on simulated devices; elsewhere stored, and allocations are not limited."""
    if not scope.runtime.limit_memory(_target_index(scope, device), fraction):
        scope.report("torch.cuda.set_per_process_memory_fraction", "stored, no limit", Fidelity.APPROXIMATE)
    scope.settings[MEMORY_FRACTION, device] = fraction


@supplies("_cuda_getMemoryFraction")
def get_memory_fraction(scope: Scope, device: int) -> float:
    """The fraction that was set, 1.0 before."""
    return scope.settings.get((MEMORY_FRACTION, device), 1.0)


@supplies("_cuda_getAllocatorBackend")
def get_allocator_backend(scope: Scope) -> str:
    """The name of CUDA's default allocator."""
    return "native"


def total(scope: Scope, device: int) -> int:
    """Return the bytes of memory of a device, as the scope's properties say or the target has them."""
    return scope.properties.get("total_memory") or scope.runtime.total_memory(_target_index(scope, device))


def mem_get_info(scope: Scope, device: int) -> tuple[int, int]:
    """Return free and total bytes of a device, for ``cudaMemGetInfo``."""
    device = scope.ordinal(Spelling("cuda", device))
    size = total(scope, device)
    return min(scope.runtime.free_memory(_target_index(scope, device)), size), size


def list_processes(scope: Scope, device: int) -> str:
    """Return the processes known to use a device, as ``torch.cuda.list_gpu_processes`` prints them."""
    processes = scope.runtime.processes(_target_index(scope, device))
    lines = [f"process {pid:>10d} uses {size / 2**20:>12.3f} MB GPU memory" for pid, size in processes]
    return "\n".join([f"GPU:{device}", *lines])
