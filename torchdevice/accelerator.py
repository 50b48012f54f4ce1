"""``torch.accelerator`` on all targets but XPU, for ``torch/accelerator``.

The accelerator is the one that the program is written for: in a program written for CUDA, ``torch.accelerator`` answers
as on a CUDA machine. On XPU torch's own functions answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.cuda import devices, memory, streams
from torchdevice.fidelity import Fidelity
from torchdevice.patching import (
    TORCHS_OWN,
    Patch,
    replaced_in_importers,
)
from torchdevice.spelling import ACCELERATORS
from torchdevice.supplied import Supplied, add, first_line

_ACCELERATORS = {accelerator: torch.device(accelerator) for accelerator in ACCELERATORS}
"""Made at import, where no mode rewrites them."""


def _supplies(name: str, function: Callable[..., Any]) -> None:
    """Supply ``torch._C.<name>`` where torch does not count the target as an accelerator."""

    def value(context: Context) -> Any:
        return TORCHS_OWN if context.runtime.is_torch_accelerator else context.bound(function)

    add(Supplied(f"torch._C.{name}", value, Fidelity.EXACT, first_line(function)))


def get_accelerator(context: Context, check: bool | None = None) -> torch.device:
    """Return the accelerator that the program is written for, as a device without an index."""
    return _ACCELERATORS[context.options.written_for]


def get_stream(context: Context, index: int) -> torch.Stream:
    """Return the current stream of a device."""
    return torch.cuda.current_stream(index)


def set_stream(context: Context, stream: torch.Stream) -> None:
    """Make a stream current on its device."""
    streams.set_stream(context, stream.stream_id, stream.device_index, stream.device_type)


def get_memory_info(context: Context, index: int) -> tuple[int, int]:
    """Return the free and the total bytes of a device."""
    return memory.mem_get_info(context, index)


def is_allocator_initialized(context: Context) -> bool:
    """Return True: memory figures are available."""
    return True


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_get_accelerator": get_accelerator,
    "_accelerator_getAccelerator": get_accelerator,
    "_accelerator_getStream": get_stream,
    "_accelerator_setStream": set_stream,
    "_accelerator_getDeviceIndex": devices.get_device,
    "_accelerator_setDeviceIndex": devices.set_device,
    "_accelerator_exchangeDevice": devices.exchange_device,
    "_accelerator_maybeExchangeDevice": devices.maybe_exchange_device,
    "_accelerator_synchronizeDevice": devices.synchronize_device,
    "_accelerator_isAllocatorInitialized": is_allocator_initialized,
    "_accelerator_emptyCache": memory.empty_cache,
    "_accelerator_getDeviceStats": memory.memory_stats,
    "_accelerator_resetPeakStats": memory.reset_peak_memory_stats,
    "_accelerator_resetAccumulatedStats": memory.reset_accumulated_memory_stats,
    "_accelerator_getMemoryInfo": get_memory_info,
}


for _name, _function in _FUNCTIONS.items():
    _supplies(_name, _function)


def _accelerator_index(context: Context, original: Any, device: Any, optional: bool = False) -> int:
    """``torch.accelerator._utils._get_device_index``, which refuses the devices that were rewritten to the target."""
    if not context.runtime.is_torch_accelerator and isinstance(device, torch.device) and context.is_targets(device):
        return context.thread.device_index
    return original(device, optional)


def patches() -> list[Patch]:
    """Return the patch of ``torch.accelerator``."""
    return [replaced_in_importers(torch.accelerator._utils, "_get_device_index", _accelerator_index, native_to="cuda")]
