"""The runtime of each device type, including runtimes that other packages register."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.devices.cpu import CpuRuntime
from torchdevice.kernel.devices.module import ModuleRuntime
from torchdevice.kernel.devices.mps_runtime import MpsRuntime
from torchdevice.kernel.devices.runtime import Runtime

_registered: dict[str, Runtime] = {}

_WITHOUT_CONVENTION: dict[str, Callable[[], Runtime]] = {"cpu": CpuRuntime, "mps": MpsRuntime}
"""Devices without a module that follows torch's convention, as those of CUDA, XPU and PrivateUse1
do.
"""

_OWN = ("cpu", "simulated", *FAMILIES)


def register_runtime(runtime: Runtime) -> Callable[[], None]:
    """Make a device available as ``target=runtime.device_type``.

    Without a target, the device is chosen where it is available and no better device is. This is
    for authors of backends of torch: a scope asks a :class:`Runtime` everything about a device. A
    backend that follows torch's convention of device modules needs no runtime of its own. For
    another backend, derive from :class:`Runtime` or from :class:`ModuleRuntime`, and override what
    differs.

    Args:
        runtime: The description of the device.

    Returns:
        A function that removes the registration.

    Raises:
        TypeError: ``runtime`` is not a :class:`Runtime`.
        ValueError: Its device type is not a name, or has a runtime already.
    """
    if isinstance(runtime, type) and issubclass(runtime, Runtime):
        raise TypeError(
            f"{runtime!r} is a class. Register an object of it, {runtime.__name__}(...)."
        )
    if not isinstance(runtime, Runtime):
        raise TypeError(f"{runtime!r} is not a runtime. Derive its class from torchdevice.Runtime.")
    device_type = getattr(runtime, "device_type", None)
    if not isinstance(device_type, str) or not device_type.isidentifier():
        raise ValueError(
            f"device_type={device_type!r} is not a device type. Use its name in torch.device."
        )
    if device_type in _registered or device_type in _OWN:
        raise ValueError(
            f"there is a runtime for {device_type!r} already. Remove it first, or use another "
            "device type."
        )
    _registered[device_type] = runtime

    def take_back() -> None:
        if _registered.get(device_type) is runtime:
            del _registered[device_type]

    return take_back


def registered() -> tuple[str, ...]:
    """Return the device types of registered runtimes."""
    return tuple(_registered)


def runtime(device_type: str) -> Runtime:
    """Return the runtime of a device type: one per process, as its figures are the process's."""
    return _registered.get(device_type) or _own_runtime(device_type)


@functools.cache
def _own_runtime(device_type: str) -> Runtime:
    return _WITHOUT_CONVENTION.get(device_type, functools.partial(ModuleRuntime, device_type))()
