"""``torch.xpu`` on devices that are not Intel's, for ``torch/xpu``. Most names do what CUDA's names of ``cuda/`` do.

``torch.xpu.is_available()`` is True only in a program written for XPU (see :mod:`torchdevice.accelerators.mps`).
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NoReturn

import torch

from torchdevice.core import thread_state
from torchdevice.core.bindings import supplied_as, supplied_function, supplied_value
from torchdevice.core.context import Context
from torchdevice.core.patching import Patch, Replaced, per_context, replaced_function, replaced_in_importers
from torchdevice.cuda import device_queries, graphs, memory, memory_history, memory_pools, monitoring, random, streams
from torchdevice.cuda.streams import EventStandIn, StreamStandIn, new_stream
from torchdevice.cuda.unsupported import POOL, refusing
from torchdevice.devices.device_properties import XpuDeviceProperties
from torchdevice.devices.device_strings import Spelling

XPU = "xpu"


XPU_DEVICE_TYPE = 12
"""``c10::DeviceType::XPU``."""


@supplied_value("torch._C._has_xpu", native_to=XPU, denies=True)
def has_xpu(context: Context) -> bool:
    """Return whether the program is written for XPU."""
    return context.program == XPU


@supplied_function("_xpu_getDeviceCount", native_to=XPU, denies=True)
def get_device_count(context: Context) -> int:
    """Return the number of devices that the scope advertises; 0 in a program written for another accelerator."""
    return context.device_count if context.program == XPU else 0


@supplied_function("_xpu_synchronize", native_to=XPU)
def synchronize(context: Context, index: int) -> None:
    """Wait for the target's work."""
    context.runtime.synchronize(context.target_index(context.ordinal(Spelling(XPU, index))))


@supplied_function("_xpu_getCurrentStream", native_to=XPU)
def get_current_stream(context: Context, index: int) -> tuple[int, int, int]:
    """Return the id of this thread's current stream on the device, the device's ordinal, and XPU's device type."""
    stream_id, device_index, _ = streams.get_current_stream(context, index)
    return stream_id, device_index, XPU_DEVICE_TYPE


@supplied_function("_xpu_getStreamFromExternal", native_to=XPU)
def get_stream_from_external(context: Context, data_ptr: int, device_index: int) -> tuple[int, int, int]:
    """Return the default stream for a null pointer, and the stream of a handle. Raise for another pointer."""
    stream_id, index, _ = streams.get_stream_from_external(context, data_ptr, device_index)
    return stream_id, index, XPU_DEVICE_TYPE


@supplied_function("_xpu_getArchFlags", native_to=XPU)
def get_arch_flags(context: Context) -> None:
    """Return None: no code for a GPU was compiled."""


@supplied_function("_xpu_recordMemoryHistory", native_to=XPU, on=memory_history.APPROXIMATE_SNAPSHOT)
def record_memory_history(
    active: Context,
    enabled: str | None,
    context: str | None,
    stacks: str,
    max_entries: int,
    clear_history: bool = False,
    skip_actions: list[str] | None = None,
) -> None:
    """Start to record allocations with their Python stack, or stop."""
    memory_history.record_memory_history(
        active, enabled, context, stacks, max_entries, clear_history, skip_actions=skip_actions
    )


@supplied_value("torch.xpu.default_generators", native_to=XPU)
def default_generators(context: Context) -> Any:
    """Return a default generator for each advertised device. A target with one device repeats its generator."""
    return random.default_generators(context)


_LIKE_CUDA = """
    init isInBadFork getDevice setDevice exchangeDevice maybeExchangeDevice canDeviceAccessPeer sleep setStream
    getCurrentRawStream isCurrentStreamCapturing emptyCache memoryStats resetPeakMemoryStats
    resetAccumulatedMemoryStats getMemoryFraction setMemoryFraction memorySnapshot beginAllocateToPool
    beginAllocateCurrentThreadToPool endAllocateToPool releasePool
"""
"""The functions of ``torch._C`` that do what CUDA's of that name does."""

for _name in _LIKE_CUDA.split():
    supplied_as(f"torch._C._xpu_{_name}", f"torch._C._cuda_{_name}", native_to=XPU)

for _name in ("_exchange_device", "_maybe_exchange_device"):
    supplied_as(f"torch.xpu.{_name}", f"torch.cuda.{_name}", native_to=XPU)

supplied_as("torch._C._xpu_graph_pool_handle", "torch._C._graph_pool_handle", native_to=XPU)
supplied_function("_xpu_getMemoryInfo", native_to=XPU)(memory.mem_get_info)


for _name in ("_xpu_changeCurrentAllocator", "_xpu_customAllocator", "_xpu_getAllocator"):
    refusing(_name, POOL, native_to=XPU)


class XpuStreamStandIn(StreamStandIn):
    """A stream of a program written for XPU."""

    module = torch.xpu
    torch_device_type = XPU_DEVICE_TYPE
    highest_priority, lowest_priority = -1, 1  # c10/xpu/XPUStream.h
    handle, pointer = "sycl_queue", "sycl::queue"

    @property
    def sycl_queue(self) -> Any:
        """``native_handle``, under XPU's name."""
        return self.native_handle


class XpuEventStandIn(EventStandIn):
    """An event of a program written for XPU."""

    module = torch.xpu
    handle, pointer = "sycl_event", "sycl::event"

    @property
    def sycl_event(self) -> int:
        """``cuda_event``, under XPU's name."""
        return self.cuda_event


class XpuMemPoolStandIn(memory_pools.MemPoolStandIn):
    """A memory pool of a program written for XPU."""

    module = torch.xpu


class XpuGraphStandIn(graphs.GraphStandIn):
    """A graph of a program written for XPU."""

    __class__ = property(lambda self: torch.xpu.XPUGraph)  # type: ignore[assignment]

    maker = "XPU"
    captures_default_stream = True

    def capture_begin(self, pool: Any = None) -> None:  # type: ignore[override]
        """Record operators from now on."""
        super().capture_begin(pool)

    def debug_dump(self, debug_path: str) -> None:  # type: ignore[override]
        """Write the recorded operators, in their order, to a file in the DOT language."""
        super().debug_dump(debug_path)

    def raw_xpu_graph(self) -> NoReturn:
        """Raise: there is no graph of SYCL."""
        thread_state.refuse("torch.xpu.XPUGraph.raw_xpu_graph", "There is no graph of SYCL. Use replay().")

    raw_xpu_graph_exec = raw_xpu_graph


@supplied_value("torch._C._XpuDeviceProperties", native_to=XPU)
def xpu_device_properties(context: Context) -> type:
    """Return the class of the objects that ``get_device_properties`` returns."""
    return XpuDeviceProperties


supplied_value("torch.xpu._XpuDeviceProperties", native_to=XPU)(xpu_device_properties)


class _InitializedFlag(device_queries.InitializedFlag):
    """``torch.xpu._initialized``."""

    device_type = XPU
    device_count = inspect.unwrap(torch.xpu.device_count).__code__


def _new_stream(context: Context, original: Any, cls: type, *args: Any, **kwargs: Any) -> StreamStandIn:
    return new_stream(context, XpuStreamStandIn, *args, **kwargs)


def _new_event(context: Context, original: Any, cls: type, enable_timing: bool = False) -> EventStandIn:
    return XpuEventStandIn(context, enable_timing)


def _new_graph(context: Context, original: Any, cls: type, keep_graph: bool = False) -> XpuGraphStandIn:
    return XpuGraphStandIn(context)


def _new_pool(
    context: Context, original: Any, cls: type, allocator: Any = None, use_on_oom: bool = False
) -> memory_pools.MemPoolStandIn:
    return memory_pools.new_pool(context, XpuMemPoolStandIn, allocator, serves_all=use_on_oom, splits=True)


def _device_count(context: Context, original: Any) -> int:
    """Return the number of devices. torch 2.10 caches the answer of its own function for the process."""
    return get_device_count(context)


def _uninitialized(index: int) -> Any:
    """Raise as a thread without a scope would: ``torch.xpu`` gets this function when it initialises XPU."""
    raise AttributeError("module 'torch.xpu' has no attribute '_get_device_properties'")


def _device_properties(context: Context, original: Any, index: int) -> XpuDeviceProperties:
    measured = device_queries.properties_of(context, index)
    found = XpuDeviceProperties(
        name=measured.name,
        total_memory=measured.total_memory,
        max_compute_units=measured.multi_processor_count,
        has_fp64=torch.float64 not in context.runtime.unsupported_dtypes,
        is_integrated_gpu=bool(measured.is_integrated),
        uuid=measured.uuid,
    )
    given = {name: value for name, value in (context.options.properties or {}).items() if hasattr(found, name)}
    return dataclasses.replace(found, **given)


def _device_capability(context: Context, original: Any, device: Any = None) -> dict[str, Any]:
    return inspect.unwrap(original)(device)  # without torch's cache, which would keep this scope's answer


def _utilization(context: Context, original: Any, device: Any = None) -> float:
    return monitoring.processor_utilization(context, "torch.xpu.utilization")


_READINGS = ("temperature", "power_draw", "clock_rate", "memory_usage")


_NO_READING = "Intel's Level Zero measures it on Intel's GPUs only. Leave it out, or use psutil."


def _patches_of_newer_names() -> list[Patch]:
    """Return the patches of names that torch 2.10 lacks."""
    found: list[Patch] = []
    if hasattr(torch.xpu, "XPUGraph"):
        found += graphs.patches_of(torch.xpu, "_xpu_isCurrentStreamCapturing", "_xpu_graph_pool_handle")
        found.append(replaced_function(torch.xpu.XPUGraph, "__new__", _new_graph, native_to=XPU))
    if hasattr(torch.xpu, "MemPool"):
        found.append(replaced_function(torch.xpu.MemPool, "__new__", _new_pool, native_to=XPU))
    if hasattr(torch.xpu, "XPUPluggableAllocator"):
        found.append(memory_pools.refuses_allocators(torch.xpu.XPUPluggableAllocator, native_to=XPU))
    for module, name, function in (
        (torch.xpu, "utilization", _utilization),
        (torch.xpu, "device_memory_used", memory.device_memory_used),
        (torch.xpu.memory, "list_gpu_processes", memory.list_gpu_processes),
    ):
        if hasattr(module, name):
            found.append(replaced_in_importers(module, name, function, native_to=XPU))
    found += [
        monitoring.refuses(torch.xpu, name, _NO_READING, native_to=XPU)
        for name in _READINGS
        if hasattr(torch.xpu, name)
    ]
    return found


def patches() -> list[Patch]:
    """Return the patches of ``torch.xpu``."""
    return [
        *_patches_of_newer_names(),
        replaced_function(torch.xpu, "get_device_capability", _device_capability, native_to=XPU),
        streams.priorities_of(XpuStreamStandIn),
        Replaced(torch.xpu, "_initialized", _InitializedFlag),
        replaced_in_importers(torch.xpu, "device_count", _device_count, native_to=XPU),
        replaced_function(torch.xpu.Stream, "__new__", _new_stream, native_to=XPU),
        replaced_function(torch.xpu.Event, "__new__", _new_event, native_to=XPU),
        Replaced(
            torch.xpu,
            "_get_device_properties",
            lambda original: per_context(original or _uninitialized, _device_properties, native_to=XPU, family=XPU),
            may_be_absent=True,
        ),
        replaced_in_importers(torch.xpu._utils, "_get_device_index", device_queries.get_device_index, native_to=XPU),
    ]
