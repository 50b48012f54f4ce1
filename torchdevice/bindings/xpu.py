"""``torch.xpu`` on devices that are not Intel's: what stands in for CUDA's names, under those of ``torch/xpu``.

Whether XPU *is available* is said by what the program is written for, as for MPS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchdevice._spelling import Spelling
from torchdevice.bindings import answers, device, history, memory, random, streams, supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope

FAMILY = "xpu"
XPU_DEVICE_TYPE = 12
"""``c10::DeviceType::XPU``."""


@answers("torch._C._has_xpu", family=FAMILY)
def has_xpu(scope: Scope) -> bool:
    """Whether the program is written for XPU."""
    return scope.written_for == FAMILY


@supplies("_xpu_getDeviceCount", family=FAMILY)
def get_device_count(scope: Scope) -> int:
    """The number of devices the scope advertises; 0 to a program that is written for another accelerator."""
    return scope.device_count if scope.written_for == FAMILY else 0


@supplies("_xpu_synchronize", family=FAMILY)
def synchronize(scope: Scope, index: int) -> None:
    """Wait for the target's work."""
    scope.runtime.synchronize(scope.device(scope.ordinal(Spelling(FAMILY, index))).index or 0)


@supplies("_xpu_getCurrentStream", family=FAMILY)
def get_current_stream(scope: Scope, index: int) -> tuple[int, int, int]:
    """The id of this thread's current stream on the device, the device, and XPU's device type."""
    stream_id, device_index, _ = streams.get_current_stream(scope, index)
    return stream_id, device_index, XPU_DEVICE_TYPE


@supplies("_xpu_recordMemoryHistory", family=FAMILY, on=history.APPROXIMATE_SNAPSHOT)
def record_memory_history(
    scope: Scope,
    enabled: str | None,
    context: str | None,
    stacks: str,
    max_entries: int,
    clear_history: bool = False,
    skip_actions: list[str] | None = None,
) -> None:
    """Record allocations with the Python stack, or stop."""
    history.record_memory_history(
        scope, enabled, context, stacks, max_entries, clear_history, skip_actions=skip_actions
    )


@answers("torch.xpu.default_generators", family=FAMILY)
def default_generators(scope: Scope) -> Any:
    """The target's default generators."""
    return random.default_generators(scope)


_SAME: dict[str, Callable[..., Any]] = {
    "_xpu_init": device.init,
    "_xpu_isInBadFork": device.is_in_bad_fork,
    "_xpu_getDevice": device.get_device,
    "_xpu_setDevice": device.set_device,
    "_xpu_exchangeDevice": device.exchange_device,
    "_xpu_maybeExchangeDevice": device.maybe_exchange_device,
    "_xpu_canDeviceAccessPeer": device.can_device_access_peer,
    "_xpu_sleep": device.sleep,
    "_xpu_setStream": streams.set_stream,
    "_xpu_getCurrentRawStream": streams.get_current_raw_stream,
    "_xpu_emptyCache": memory.empty_cache,
    "_xpu_getMemoryInfo": memory.mem_get_info,
    "_xpu_memoryStats": memory.memory_stats,
    "_xpu_resetPeakMemoryStats": memory.reset_peak_memory_stats,
    "_xpu_resetAccumulatedMemoryStats": memory.reset_accumulated_memory_stats,
    "_xpu_getMemoryFraction": memory.get_memory_fraction,
    "_xpu_setMemoryFraction": memory.set_memory_fraction,
    "_xpu_memorySnapshot": history.memory_snapshot,
    "torch.xpu._exchange_device": device.exchange_device,
    "torch.xpu._maybe_exchange_device": device.maybe_exchange_device,
}
"""Names of XPU that mean what a name of CUDA means."""

_ON = {
    "_xpu_memoryStats": memory.APPROXIMATE_FIGURES,
    "_xpu_setMemoryFraction": memory.LIMITS,
    "_xpu_memorySnapshot": history.APPROXIMATE_SNAPSHOT,
}

for _name, _function in _SAME.items():
    supplies(_name, family=FAMILY, on=_ON.get(_name))(_function)
