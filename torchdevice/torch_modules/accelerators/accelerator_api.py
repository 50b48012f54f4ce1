"""``torch.accelerator`` on all targets but XPU, for ``torch/accelerator``.

The accelerator is the one that the program is written for: in a program written for CUDA,
``torch.accelerator`` answers as on a CUDA machine. On XPU torch's own functions answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import Supplied, add, replaces, summary_of
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.runtime import device_of
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import TORCHS_OWN
from torchdevice.torch_modules.cuda import device_queries, memory, streams


def _answer(function: Callable[..., Any], context: Context) -> Any:
    """Return a function's answer where torch does not count the target as an accelerator."""
    if context.runtime.support.is_torch_accelerator:
        return TORCHS_OWN
    return context.supplied.bound(function)


def get_accelerator(context: Context, check: bool | None = None) -> torch.device:
    """Return the accelerator that the program is written for, as a device without an index."""
    return device_of(context.program, None)


def set_stream(context: Context, stream: torch.Stream) -> None:
    """Make a stream current on its device."""
    streams.set_stream(context, stream.stream_id, stream.device_index, stream.device_type)


def get_default_generator(context: Context, index: int) -> torch.Generator:
    """Return the default generator of a device."""
    return context.runtime.default_generator(context.devices.target_index(index))


def get_device_capability(context: Context, index: int) -> NoReturn:
    """Raise torch's error, as on CUDA, which reports no capability (DeviceGuardImplInterface.h).

    Raises:
        RuntimeError: Always.
    """
    raise RuntimeError("Backend doesn't support getting device capabilities.")


def empty_host_cache(context: Context) -> None:
    """Do nothing: no page-locked host memory is cached."""


def is_allocator_initialized(context: Context) -> bool:
    """Return True: memory figures are available."""
    return True


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_get_accelerator": get_accelerator,
    "_accelerator_getAccelerator": get_accelerator,
    "_accelerator_getStream": streams.current_stream,
    "_accelerator_setStream": set_stream,
    "_accelerator_getDeviceIndex": device_queries.get_device,
    "_accelerator_setDeviceIndex": device_queries.set_device,
    "_accelerator_getDeviceCapability": get_device_capability,
    "_accelerator_getDefaultGenerator": get_default_generator,
    "_accelerator_exchangeDevice": device_queries.exchange_device,
    "_accelerator_maybeExchangeDevice": device_queries.exchange_device,
    "_accelerator_synchronizeDevice": device_queries.synchronize_device,
    "_accelerator_isAllocatorInitialized": is_allocator_initialized,
    "_accelerator_emptyCache": memory.empty_cache,
    "_accelerator_emptyHostCache": empty_host_cache,
    "_accelerator_getDeviceStats": memory.memory_stats,
    "_accelerator_resetPeakStats": memory.reset_peak_memory_stats,
    "_accelerator_resetAccumulatedStats": memory.reset_accumulated_memory_stats,
    "_accelerator_getMemoryInfo": memory.mem_get_info,
}


for _name, _function in _FUNCTIONS.items():
    _value = functools.partial(_answer, _function)
    add(Supplied(f"torch._C.{_name}", _value, Fidelity.EXACT, summary_of(_function)))


@replaces(torch.accelerator._utils, "_get_device_index", native_to="cuda", by_value=True)
def _accelerator_index(context: Context, original: Any, device: Any, optional: bool = False) -> int:
    """``torch.accelerator._utils._get_device_index``, which refuses rewritten devices."""
    if context.runtime.support.is_torch_accelerator:
        return original(device, optional)
    if isinstance(device, torch.device) and context.devices.is_targets(device):
        return context.thread.device_index
    if isinstance(device, str):
        return device_queries.get_device_index(
            context, lambda device, *_: original(device, optional), device, optional
        )
    return original(device, optional)


@replaces(getattr(torch.accelerator, "Graph", None), "__new__", native_to="cuda")
def _refuse_graph(
    context: Context, original: Any, cls: type, *args: Any, **kwargs: Any
) -> Any:  # torch 2.12 and later
    if context.runtime.support.is_torch_accelerator:
        return original(cls, *args, **kwargs)
    thread_state.refuse("torch.accelerator.Graph", "Use torch.cuda.CUDAGraph.")
