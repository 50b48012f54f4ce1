"""``torch.xpu`` on devices that are not Intel's. Most names call CUDA's in ``../cuda/``.

``torch.xpu.is_available()`` is True only in a program written for XPU (see
:mod:`torchdevice.torch_modules.accelerators.mps`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torchdevice.kernel.bindings import (
    imported_by_value,
    replaces,
    supplied_as,
    supplied_function,
    supplied_value,
)
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_properties import XpuDeviceProperties
from torchdevice.kernel.devices.device_strings import Spelling
from torchdevice.kernel.lowlevel.lazy_initialization import DEVICE_TYPES
from torchdevice.kernel.patching import ABSENT, without_cache, without_original
from torchdevice.torch_modules.cuda import device_queries, memory, random, streams

XPU = "xpu"


@supplied_value("torch._C._has_xpu", native_to=XPU, denies=False)
def has_xpu(context: Context) -> bool:
    """Return whether the program is written for XPU."""
    return context.program == XPU


@supplied_function("_xpu_getDeviceCount", native_to=XPU, denies=ABSENT)
def get_device_count(context: Context) -> int:
    """Return the number of advertised devices; 0 for programs of another accelerator."""
    return context.devices.count if context.program == XPU else 0


@supplied_function("_xpu_synchronize", native_to=XPU)
def synchronize(context: Context, index: int) -> None:
    """Wait for the target's work."""
    context.runtime.synchronize(
        context.devices.target_index(context.devices.ordinal(Spelling(XPU, index)))
    )


supplied_value("torch.xpu.default_generators", native_to=XPU)(random.default_generators)

_LIKE_CUDA = """
    init isInBadFork getDevice setDevice exchangeDevice maybeExchangeDevice canDeviceAccessPeer
    sleep setStream getCurrentStream getStreamFromExternal getCurrentRawStream
    isCurrentStreamCapturing emptyCache memoryStats resetPeakMemoryStats
    resetAccumulatedMemoryStats getMemoryFraction setMemoryFraction memorySnapshot
    beginAllocateToPool beginAllocateCurrentThreadToPool endAllocateToPool releasePool
"""
"""The functions of ``torch._C`` with a counterpart of that name among CUDA's."""

for _name in _LIKE_CUDA.split():
    supplied_as(f"torch._C._xpu_{_name}", f"torch._C._cuda_{_name}", native_to=XPU)

for _name in ("_exchange_device", "_maybe_exchange_device"):
    supplied_as(f"torch.xpu.{_name}", f"torch.cuda.{_name}", native_to=XPU)

supplied_function("_xpu_getMemoryInfo", native_to=XPU)(memory.mem_get_info)


class XpuStreamStandIn(streams.StreamStandIn):
    """A stream of a program written for XPU."""

    module = torch.xpu
    torch_device_type = DEVICE_TYPES[XPU]
    highest_priority, lowest_priority = -1, 1  # c10/xpu/XPUStream.h
    handle, pointer = "sycl_queue", "sycl::queue"
    sycl_queue = streams.StreamStandIn.cuda_stream
    record_event = torch.xpu.Stream.record_event  # type: ignore[assignment]


class XpuEventStandIn(streams.EventStandIn):
    """An event of a program written for XPU."""

    module = torch.xpu
    handle, pointer = "sycl_event", "sycl::event"
    sycl_event = streams.EventStandIn.cuda_event

    def __new__(cls, context: Context, enable_timing: bool = False) -> XpuEventStandIn:
        return super().__new__(cls, context, enable_timing)  # type: ignore[return-value]


@supplied_value("torch._C._XpuDeviceProperties", native_to=XPU)
def xpu_device_properties(context: Context) -> type:
    """Return the class of the objects that ``get_device_properties`` returns."""
    return XpuDeviceProperties


supplied_value("torch.xpu._XpuDeviceProperties", native_to=XPU)(xpu_device_properties)


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
    given = {
        name: value
        for name, value in (context.devices.figure("properties", index) or {}).items()
        if hasattr(found, name)
    }
    return dataclasses.replace(found, **given)


@replaces(torch.xpu, "utilization", by_value=True, optional=True)
def _utilization(context: Context, original: Any, device: Any = None) -> float:
    return device_queries.processor_utilization(context, "torch.xpu.utilization")


if hasattr(torch.xpu, "XPUGraph"):  # torch 2.10 has neither
    imported_by_value(torch.xpu.graphs, "_xpu_isCurrentStreamCapturing")
replaces(getattr(torch.xpu, "MemPool", None), "__new__")(memory.new_pool)
streams.replaces_classes(XpuStreamStandIn, XpuEventStandIn)
device_queries.replaces_functions(torch.xpu, _device_properties)
replaces(torch.xpu, "get_device_capability")(without_cache)
# torch 2.10 caches the answer of its own function for the process.
replaces(torch.xpu, "device_count", by_value=True)(without_original(get_device_count))
