"""``torch.accelerator`` on a target that torch does not count as an accelerator. For ``torch/accelerator``.

There it says what it says on a CUDA machine: the accelerator is cuda, whose module is ``torch.cuda``, and tensors asked
for on it are on the target. Where the target is an accelerator (MPS, XPU, PrivateUse1), torch answers for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchdevice._journal import Fidelity
from torchdevice._patching import OWN
from torchdevice._spelling import ACCELERATORS
from torchdevice.bindings import Supplied, add, device, memory, streams

if TYPE_CHECKING:
    from torchdevice._scope import Scope


_ACCELERATORS = {family: torch.device(family) for family in ACCELERATORS}
"""Made at import, where no mode rewrites them."""


def _supplies(name: str, function: Callable[..., Any]) -> None:
    """Supply ``torch._C.<name>`` where torch counts no accelerator; torch's own answers otherwise."""

    def value(scope: Scope) -> Any:
        return OWN if scope.runtime.is_torch_accelerator else scope.bound(function)

    add(Supplied(f"torch._C.{name}", value, Fidelity.EXACT, (function.__doc__ or "").split("\n")[0]))


def get_accelerator(scope: Scope, check: bool | None = None) -> torch.device:
    """The device that the program is written for, without an index."""
    return _ACCELERATORS[scope.written_for]


def get_stream(scope: Scope, index: int) -> torch.Stream:
    """The current stream of a device."""
    return torch.cuda.current_stream(index)


def set_stream(scope: Scope, stream: torch.Stream) -> None:
    """Make a stream current on its device."""
    streams.set_stream(scope, stream.stream_id, stream.device_index, stream.device_type)


def synchronize_device(scope: Scope, index: int) -> None:
    """Wait for the target's work."""
    scope.runtime.synchronize(index)


def get_memory_info(scope: Scope, index: int) -> tuple[int, int]:
    """Free and total bytes."""
    return memory.mem_get_info(scope, index)


def is_allocator_initialized(scope: Scope) -> bool:
    """True: figures can be had."""
    return True


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_get_accelerator": get_accelerator,
    "_accelerator_getAccelerator": get_accelerator,
    "_accelerator_getStream": get_stream,
    "_accelerator_setStream": set_stream,
    "_accelerator_getDeviceIndex": device.get_device,
    "_accelerator_setDeviceIndex": device.set_device,
    "_accelerator_exchangeDevice": device.exchange_device,
    "_accelerator_maybeExchangeDevice": device.maybe_exchange_device,
    "_accelerator_synchronizeDevice": synchronize_device,
    "_accelerator_isAllocatorInitialized": is_allocator_initialized,
    "_accelerator_emptyCache": memory.empty_cache,
    "_accelerator_getDeviceStats": memory.memory_stats,
    "_accelerator_resetPeakStats": memory.reset_peak_memory_stats,
    "_accelerator_resetAccumulatedStats": memory.reset_accumulated_memory_stats,
    "_accelerator_getMemoryInfo": get_memory_info,
}

for _name, _function in _FUNCTIONS.items():
    _supplies(_name, _function)
