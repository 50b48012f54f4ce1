"""The devices' number, properties and current one, for ``cuda/__init__.py``, ``_utils.py``."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import REPLACED, replaces, supplied_function, supplied_value
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import of_module
from torchdevice.kernel.devices.device_properties import DeviceProperties
from torchdevice.kernel.devices.device_strings import Spelling, parse
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.lowlevel import lazy_initialization
from torchdevice.kernel.patching import (
    ABSENT,
    Callback,
    replaced_function,
    without_cache,
    without_original,
)
from torchdevice.torch_modules.cuda import memory, sleeping


@supplied_function("_cuda_getDeviceCount", denies=ABSENT)
def get_device_count(context: Context) -> int:
    """Return the number of devices that the scope advertises."""
    # Torch documents that this one calls the driver.
    if sys._getframe(1).f_code is torch.cuda.is_available.__code__:
        context.driver.touch()
    return context.devices.count


@supplied_function("_cuda_init")
def init(context: Context) -> None:
    """Note the accelerator's first use in this process, and run CUDA's checks of it."""
    context.driver.initialize()


@supplied_function("_cuda_isInBadFork")
def is_in_bad_fork(context: Context) -> bool:
    """Return whether this process was forked from one that had used the accelerator."""
    return context.driver.is_in_bad_fork


@supplied_function("_cuda_getDevice")
def get_device(context: Context) -> int:
    """Return the ordinal of this thread's current device."""
    context.driver.initialize()
    return context.thread.device_index


@supplied_function("_cuda_setDevice")
def set_device(context: Context, device: int) -> None:
    """Set this thread's current device."""
    context.driver.initialize()
    exists = 0 <= device < context.devices.count
    context.thread.select(device if exists else context.devices.ordinal(Spelling("cuda", device)))


# Those with "maybe" avoid creating a device context, which a stand-in device does not have.
@supplied_function("_cuda_exchangeDevice _cuda_maybeExchangeDevice")
@supplied_function("torch.cuda._exchange_device torch.cuda._maybe_exchange_device")
def exchange_device(context: Context, device: int) -> int:
    """Set the current device and return the previous one; a negative ordinal does nothing (-1)."""
    if device < 0:
        return -1
    previous = context.thread.device_index
    if device != previous:
        set_device(context, device)
    return previous


@supplied_function("_cuda_hasPrimaryContext")
def has_primary_context(context: Context, device: int) -> bool:
    """Return whether the device is advertised."""
    return 0 <= device < context.devices.count


@supplied_function("_cuda_canDeviceAccessPeer")
def can_device_access_peer(context: Context, device: int, peer_device: int) -> bool:
    """Return True for two different devices: tensors can be copied between them."""
    return device != peer_device


@supplied_function("_cuda_getArchFlags", Fidelity.DECLARED)
def get_arch_flags(context: Context) -> str:
    """Return the architectures of the devices' compute capabilities, such as ``"sm_80"``."""
    found = sorted(
        {context.devices.figure("capability", index) for index in range(context.devices.count)}
    )
    return " ".join("sm_{}{}".format(*each) for each in found)


@supplied_function("_cuda_synchronize")
def synchronize(context: Context) -> None:
    """Wait for the target's work."""
    context.driver.initialize()
    synchronize_device(context, context.thread.device_index)


def synchronize_device(context: Context, index: int) -> None:
    """Wait for the work of one of the program's devices."""
    context.runtime.synchronize(context.devices.target_index(index))
    context.observers.tell("device_synchronized", index)


@supplied_function("_cuda_sleep")
def sleep(context: Context, cycles: int) -> None:
    """Keep a simulated device's stream busy, or the host asleep, for cycles of a 1 GHz clock."""
    if context.runtime.supplied.has_handles:
        sleeping.sleep(context, cycles)
    else:
        time.sleep(cycles / sleeping.CYCLES_PER_SECOND)


def properties_of(context: Context, device: int) -> DeviceProperties:
    """Return the properties of the program's device with an ordinal.

    They are kept: ``torch.autocast`` reads them each time, and reading the machine's memory takes
    longer than a small step of training.
    """
    if (_PROPERTIES, device) not in context.settings:
        context.settings[_PROPERTIES, device] = _read_properties(context, device)
    return context.settings[_PROPERTIES, device]


_PROPERTIES = "device properties"


def _read_properties(context: Context, device: int) -> DeviceProperties:
    given = context.devices.figure("properties", device) or {}
    capability = context.devices.figure("capability", device)
    name = given.get("name") or context.runtime.name(context.devices.target_index(device))
    measured = DeviceProperties(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=memory.total(context, device),
        multi_processor_count=context.runtime.multiprocessor_count(),
        uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"{name}:{device}"),
        is_integrated=int(context.runtime.is_integrated),
    )
    return dataclasses.replace(measured, **given)


@supplied_value("torch._C._CudaDeviceProperties")
def cuda_device_properties(context: Context) -> type:
    """Return the class of the objects that ``get_device_properties`` returns."""
    return DeviceProperties


supplied_value("torch.cuda._CudaDeviceProperties")(cuda_device_properties)


class InitializedFlag:
    """``torch.cuda._initialized``: True in threads that are in a scope, torch's value elsewhere.

    Once the flag is true, ``torch.cuda.device_count()`` caches its answer for the whole process. So
    the flag is false where that function reads it, and the number of a scope's devices is never
    cached.
    """

    def __init__(self, original: Any, module: Any):
        self._original, self._family = original, of_module(module)
        self._device_count = inspect.unwrap(module.device_count).__code__

    def __bool__(self) -> bool:
        context = thread_state.state.context
        if context is None or self._family not in context.names.stood_for:
            return bool(self._original)
        return sys._getframe(1).f_code is not self._device_count

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


def get_device_index(
    context: Context, original: Any, device: Any, optional: bool = False, allow_cpu: bool = False
) -> int:
    """``torch.cuda._utils._get_device_index``, which refuses devices that the mode rewrote."""
    if device is None and optional:
        return context.thread.device_index
    if type(device) is int:
        return device
    if isinstance(device, torch.device) and context.devices.is_targets(device):
        return _index_on_target(context, device, allow_cpu)
    spelling = parse(device) if isinstance(device, (str, torch.device)) else None
    if spelling is None or spelling.accelerator != context.program:
        return original(device, optional, allow_cpu)  # which refuses another accelerator's device
    if spelling.index is not None:
        return spelling.index
    if optional:
        return context.thread.device_index
    raise ValueError(
        f"Expected a torch.device with a specified index or an integer, but got:{device}"
    )


def _index_on_target(context: Context, device: torch.device, allow_cpu: bool) -> int:
    if device.index is not None:
        return device.index
    if allow_cpu and context.runtime.shares_host_memory:
        return -1
    return context.thread.device_index


@replaces(torch.cuda, "init")
def _init(context: Context, original: Any) -> None:
    """``torch.cuda.init``, which returns at once where ``_initialized`` is true."""
    context.driver.initialize()
    original()


def _lazy_init(context: Context, original: Any) -> None:
    """``_lazy_init``, called first by most functions of the module: it only refuses a fork."""
    if context.driver.user != os.getpid() and context.driver.is_in_bad_fork:
        original()


def _device_properties(context: Context, original: Any, index: int) -> DeviceProperties:
    context.driver.initialize()
    return properties_of(context, index)


@replaces(torch, "get_device_module", native_to="cuda")
def _get_device_module(context: Context, original: Any, device: Any = None) -> Any:
    """``torch.get_device_module``: the module of the accelerator the program spelled.

    The module of a target, such as ``torch.cpu``, lacks functions that the program calls.
    """
    if (
        not context.runtime.support.is_torch_accelerator
        and isinstance(device, torch.device)
        and context.devices.is_targets(device)
    ):
        return getattr(torch, context.program)
    spelling = parse(device) if isinstance(device, str) else None
    if spelling is not None:
        return getattr(torch, spelling.accelerator)
    return without_cache(context, original, device)


replaces(torch._utils, "_get_current_device_index", native_to="cuda")(
    lambda context, _: context.thread.device_index
)
replaces(torch.cuda, "_is_in_bad_fork")(without_original(is_in_bad_fork))


def processor_utilization(context: Context, name: str) -> float:
    """Return the percentage of time the CPU's cores worked, instead of the figure ``name``."""
    import psutil

    context.report(name, "processor utilization", Fidelity.APPROXIMATE)
    return psutil.cpu_percent()


@replaces(torch.cuda, "utilization")
def _utilization(context: Context, original: Any, device: Any = None) -> int:
    return round(processor_utilization(context, "torch.cuda.utilization"))


def replaces_functions(module: Any, properties: Callable[..., Any]) -> None:
    """Replace functions of an accelerator's module: flag, properties and ordinals."""
    replaces(module, "_initialized", makes=True)(lambda original: InitializedFlag(original, module))
    replaces(module, "_lazy_init", by_value=True)(_lazy_init)
    # There only once torch has initialised the accelerator.
    REPLACED.append(
        replaced_function(module, "_get_device_properties", properties, may_be_absent=True)
    )
    replaces(module._utils, "_get_device_index", by_value=True)(get_device_index)


replaces_functions(torch.cuda, _device_properties)
# Device_count() asks again in a scope.
replaces(torch.cuda, "_cached_device_count", makes=True)(lambda _: None)
_nothing: Callable[[], None] = type(None)  # without a frame of Python
REPLACED.append(Callback(_nothing, lazy_initialization.forget))
# Its cached answers are those of the target, so they are dropped with the last scope.
REPLACED.append(Callback(_nothing, torch.cuda._check_bf16_tensor_supported.cache_clear))
