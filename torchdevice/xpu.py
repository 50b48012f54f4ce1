"""``torch.xpu`` on devices that are not Intel's, for ``torch/xpu``. Most names do what CUDA's names of ``cuda/`` do.

``torch.xpu.is_available()`` is True only in a program written for XPU (see :mod:`torchdevice.mps`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.cuda import devices, memory, memory_history, random, streams
from torchdevice.cuda.streams import EventStandIn, StreamStandIn, new_stream
from torchdevice.device_properties import DeviceProperties
from torchdevice.patching import Patch, Replaced, per_context, replaced_function, replaced_in_importers
from torchdevice.spelling import Spelling
from torchdevice.supplied import supplied_function, supplied_value

XPU = "xpu"


XPU_DEVICE_TYPE = 12
"""``c10::DeviceType::XPU``."""


@supplied_value("torch._C._has_xpu", native_to=XPU)
def has_xpu(context: Context) -> bool:
    """Return whether the program is written for XPU."""
    return context.options.written_for == XPU


@supplied_function("_xpu_getDeviceCount", native_to=XPU)
def get_device_count(context: Context) -> int:
    """Return the number of devices that the scope advertises; 0 in a program written for another accelerator."""
    return context.device_count if context.options.written_for == XPU else 0


@supplied_function("_xpu_synchronize", native_to=XPU)
def synchronize(context: Context, index: int) -> None:
    """Wait for the target's work."""
    context.runtime.synchronize(context.device(context.ordinal(Spelling(XPU, index))).index or 0)


@supplied_function("_xpu_getCurrentStream", native_to=XPU)
def get_current_stream(context: Context, index: int) -> tuple[int, int, int]:
    """Return the id of this thread's current stream on the device, the device's ordinal, and XPU's device type."""
    stream_id, device_index, _ = streams.get_current_stream(context, index)
    return stream_id, device_index, XPU_DEVICE_TYPE


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


_LIKE_CUDA: dict[str, Callable[..., Any]] = {
    "_xpu_init": devices.init,
    "_xpu_isInBadFork": devices.is_in_bad_fork,
    "_xpu_getDevice": devices.get_device,
    "_xpu_setDevice": devices.set_device,
    "_xpu_exchangeDevice": devices.exchange_device,
    "_xpu_maybeExchangeDevice": devices.maybe_exchange_device,
    "_xpu_canDeviceAccessPeer": devices.can_device_access_peer,
    "_xpu_sleep": devices.sleep,
    "_xpu_setStream": streams.set_stream,
    "_xpu_getCurrentRawStream": streams.get_current_raw_stream,
    "_xpu_emptyCache": memory.empty_cache,
    "_xpu_getMemoryInfo": memory.mem_get_info,
    "_xpu_memoryStats": memory.memory_stats,
    "_xpu_resetPeakMemoryStats": memory.reset_peak_memory_stats,
    "_xpu_resetAccumulatedMemoryStats": memory.reset_accumulated_memory_stats,
    "_xpu_getMemoryFraction": memory.get_memory_fraction,
    "_xpu_setMemoryFraction": memory.set_memory_fraction,
    "_xpu_memorySnapshot": memory_history.memory_snapshot,
    "torch.xpu._exchange_device": devices.exchange_device,
    "torch.xpu._maybe_exchange_device": devices.maybe_exchange_device,
}
"""Names of XPU, and the function of CUDA's name that has the same meaning."""


_ON = {
    "_xpu_memoryStats": memory.APPROXIMATE_FIGURES,
    "_xpu_setMemoryFraction": memory.LIMITS,
    "_xpu_memorySnapshot": memory_history.APPROXIMATE_SNAPSHOT,
}


for _name, _function in _LIKE_CUDA.items():
    supplied_function(_name, native_to=XPU, on=_ON.get(_name))(_function)


class XpuStreamStandIn(StreamStandIn):
    """A stream of a program written for XPU."""

    module = torch.xpu
    torch_device_type = XPU_DEVICE_TYPE


class XpuEventStandIn(EventStandIn):
    """An event of a program written for XPU."""

    module = torch.xpu


class _InitializedFlag(devices.InitializedFlag):
    """``torch.xpu._initialized``."""

    device_type = XPU
    device_count = inspect.unwrap(torch.xpu.device_count).__code__


def _new_stream(context: Context, original: Any, cls: type, *args: Any, **kwargs: Any) -> StreamStandIn:
    return new_stream(context, XpuStreamStandIn, *args, **kwargs)


def _new_event(
    context: Context,
    original: Any,
    cls: type,
    enable_timing: bool = False,
    blocking: bool = False,
    interprocess: bool = False,
) -> EventStandIn:
    return XpuEventStandIn(context, enable_timing)


def _device_count(context: Context, original: Any) -> int:
    """Return the number of devices. torch 2.10 caches the answer of its own function for the process."""
    return get_device_count(context)


def _uninitialized(index: int) -> Any:
    """Raise as a thread without a scope would: ``torch.xpu`` gets this function when it initialises XPU."""
    raise AttributeError("module 'torch.xpu' has no attribute '_get_device_properties'")


def _device_properties(context: Context, original: Any, index: int) -> DeviceProperties:
    return devices.properties_of(context, index)


def patches() -> list[Patch]:
    """Return the patches of ``torch.xpu``."""
    return [
        Replaced(torch.xpu, "_initialized", _InitializedFlag),
        replaced_in_importers(torch.xpu, "device_count", _device_count, native_to=XPU),
        replaced_function(torch.xpu.Stream, "__new__", _new_stream, native_to=XPU),
        replaced_function(torch.xpu.Event, "__new__", _new_event, native_to=XPU),
        Replaced(
            torch.xpu,
            "_get_device_properties",
            lambda original: per_context(original or _uninitialized, _device_properties, native_to=XPU),
            may_be_absent=True,
        ),
        replaced_in_importers(torch.xpu._utils, "_get_device_index", devices.get_device_index, native_to=XPU),
    ]
