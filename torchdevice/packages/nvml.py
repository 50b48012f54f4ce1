"""``pynvml``: NVIDIA's management library for a scope's devices.

On simulated GPUs there are the devices of the scope, with their names, identifiers and memory. What
would have to be measured, such as utilization, temperature, power and processes, raises the
library's own error for what a device does not support. On other targets initializing it fails as on
a machine without NVIDIA's driver, unless ``devices=`` gives some.

The functions serve NVIDIA's ``nvidia-ml-py`` too, where it is installed: only the library beneath
it is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch

from torchdevice.kernel.bindings import later
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.options import of_device
from torchdevice.kernel.patching import Patch, replaced_function
from torchdevice.kernel.thread_state import state
from torchdevice.packages import managed_devices
from torchdevice.packages.finder import StandInModule
from torchdevice.packages.managed_devices import ManagedDevice
from torchdevice.packages.registry import MODULES, has, stands_in
from torchdevice.torch_modules.cuda.constants import CUDA

F = TypeVar("F", bound=Callable[..., Any])

DRIVER = "580.00"
"""The version of the driver, a constant: a series that serves CUDA 12 and 13."""


def cuda_version() -> str:
    """Return CUDA's version: of the installed torch build, or the one that scopes declare."""
    return torch.version.cuda or CUDA


_CODES = {
    "NVML_SUCCESS": 0,
    "NVML_ERROR_UNINITIALIZED": 1,
    "NVML_ERROR_INVALID_ARGUMENT": 2,
    "NVML_ERROR_NOT_SUPPORTED": 3,
    "NVML_ERROR_NO_PERMISSION": 4,
    "NVML_ERROR_NOT_FOUND": 6,
    "NVML_ERROR_DRIVER_NOT_LOADED": 9,
    "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
    "NVML_ERROR_FUNCTION_NOT_FOUND": 13,
    "NVML_ERROR_GPU_IS_LOST": 15,
    "NVML_ERROR_UNKNOWN": 999,
}
"""The library's numbers of errors (nvml.h)."""

_VALUES = {
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_CLOCK_GRAPHICS": 0,
    "NVML_CLOCK_SM": 1,
    "NVML_CLOCK_MEM": 2,
    "NVML_INIT_FLAG_NO_GPUS": 1,
}
"""Numbers of the library that programs give to functions which are not stood in for."""

_TEXTS = {
    0: "Success",
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    999: "Unknown Error",
}
"""The library's texts for them."""


class NVMLError(Exception):
    """An error of the library. Called with a number, the class makes its class for the number."""

    _classes: dict[int, type[NVMLError]] = {}

    value: int

    def __new__(cls, value: int | None = None) -> NVMLError:
        kind = cls if value is None else cls._classes.get(value, cls)
        made: NVMLError = Exception.__new__(kind)
        made.value = kind.value if value is None else value
        return made

    def __str__(self) -> str:
        return _TEXTS.get(self.value, f"NVML Error with code {self.value}")

    def __reduce__(self) -> Any:
        return NVMLError, (self.value,)


def _error_classes() -> None:
    NVMLError.__module__ = "pynvml"
    has("pynvml.NVMLError", NVMLError)
    for name, number in _CODES.items():
        has(f"pynvml.{name}", number)
        if number:
            words = name.removeprefix("NVML_ERROR_").split("_")
            camel = (word if word == "GPU" else word.capitalize() for word in words)
            label = f"NVMLError_{''.join(camel)}"
            made: Any = type(
                label,
                (NVMLError,),
                {"value": number, "__module__": "pynvml", "__doc__": _TEXTS[number]},
            )
            NVMLError._classes[number] = made
            has(f"pynvml.{label}", made)
    for name, number in _VALUES.items():
        has(f"pynvml.{name}", number)


_error_classes()


def _error(name: str) -> Exception:
    """Return an error of the module that the program has imported, which may be NVIDIA's own."""
    found = sys.modules.get("pynvml")
    kind: Any = vars(found).get("NVMLError", NVMLError) if found is not None else NVMLError
    return kind(_CODES[name])


_USERS = "NVML's users"


def _context() -> Context:
    """Return the context of a program that has initialized the library.

    Raises:
        NVMLError: It has not, or there is no scope.
    """
    context = state.context
    if context is None or not context.settings.get(_USERS):
        raise _error("NVML_ERROR_UNINITIALIZED")
    return context


def _device(handle: ManagedDevice) -> ManagedDevice:
    """Return a device of a program that has initialized the library."""
    _context()
    return handle


def _shows_devices(context: Context | None) -> bool:
    return context is not None and (
        context.runtime.supplied.is_gpu or context.options.devices is not None
    )


def _exact(name: str) -> Callable[[F], F]:
    return stands_in(f"pynvml.{name}", Fidelity.EXACT, "the scope's devices")


def _declared(name: str, note: str) -> Callable[[F], F]:
    return stands_in(f"pynvml.{name}", Fidelity.DECLARED, note)


@_exact("nvmlInit")
def nvmlInit() -> None:
    """Begin to use the library."""
    context = state.context
    if context is None or not _shows_devices(context):
        raise _error("NVML_ERROR_LIBRARY_NOT_FOUND")
    context.settings[_USERS] = context.settings.get(_USERS, 0) + 1


@_exact("nvmlInitWithFlags")
def nvmlInitWithFlags(flags: int) -> None:
    """Begin to use the library; the flags mean nothing here."""
    nvmlInit()


@_exact("nvmlShutdown")
def nvmlShutdown() -> None:
    """Stop using the library, once for each time that it was initialized."""
    context = _context()
    context.settings[_USERS] -= 1


def _devices() -> list[ManagedDevice]:
    context = _context()
    given = context.options, context.runtime
    return [managed_devices.device(*given, index) for index in range(managed_devices.count(*given))]


@_exact("nvmlDeviceGetCount")
def nvmlDeviceGetCount() -> int:
    """Return the number of devices."""
    return len(_devices())


@_exact("nvmlDeviceGetHandleByIndex")
def nvmlDeviceGetHandleByIndex(index: int) -> ManagedDevice:
    """Return the device with a number."""
    return _found("index", int(index), "NVML_ERROR_INVALID_ARGUMENT")


def _found(field: str, wanted: Any, error: str = "NVML_ERROR_NOT_FOUND") -> ManagedDevice:
    value = wanted.decode() if isinstance(wanted, bytes) else wanted
    for each in _devices():
        if getattr(each, field) == value:
            return each
    raise _error(error)


@_exact("nvmlDeviceGetHandleByUUID")
def nvmlDeviceGetHandleByUUID(uuid: Any) -> ManagedDevice:
    """Return the device with an identifier, such as ``nvmlDeviceGetUUID`` returns."""
    return _found("uuid", uuid)


@_exact("nvmlDeviceGetHandleByPciBusId")
def nvmlDeviceGetHandleByPciBusId(pciBusId: Any) -> ManagedDevice:
    """Return the device at a place of the PCI bus."""
    return _found("bus", pciBusId)


@_exact("nvmlDeviceGetIndex")
def nvmlDeviceGetIndex(handle: ManagedDevice) -> int:
    """Return the number of a device."""
    return _device(handle).index


@_exact("nvmlDeviceGetName")
def nvmlDeviceGetName(handle: ManagedDevice) -> str:
    """Return the name of a device."""
    return _device(handle).name


@_declared("nvmlDeviceGetUUID", "computed from the name and the number")
def nvmlDeviceGetUUID(handle: ManagedDevice) -> str:
    """Return the identifier of a device, which is computed from its name and number."""
    return _device(handle).uuid


@_declared("nvmlDeviceGetPciInfo", "places in the order of the numbers")
def nvmlDeviceGetPciInfo(handle: ManagedDevice) -> Any:
    """Return the place of a device on the PCI bus, which follows from its number."""
    bus = _device(handle).bus
    return SimpleNamespace(busId=bus, busIdLegacy=bus[4:], domain=0, bus=handle.index + 1, device=0)


@_declared("nvmlDeviceGetMinorNumber", "the number of the device")
def nvmlDeviceGetMinorNumber(handle: ManagedDevice) -> int:
    """Return the number in the name of a device's file."""
    return _device(handle).index


@_exact("nvmlDeviceGetMemoryInfo")
def nvmlDeviceGetMemoryInfo(handle: ManagedDevice, version: Any = None) -> Any:
    """Return the bytes of a device: ``total``, ``free`` and ``used``."""
    free = min(_context().runtime.free_memory(handle.there), handle.total)
    return SimpleNamespace(total=handle.total, free=free, used=handle.total - free, reserved=0)


@_exact("nvmlDeviceGetCudaComputeCapability")
def nvmlDeviceGetCudaComputeCapability(handle: ManagedDevice) -> tuple[int, int]:
    """Return the compute capability of a device."""
    found: tuple[int, int] = of_device(_context().options.capability, _device(handle).index)
    return found


@_declared("nvmlSystemGetDriverVersion", f"{DRIVER}")
def nvmlSystemGetDriverVersion() -> str:
    """Return the version of the driver, a constant."""
    _context()
    return DRIVER


@_declared("nvmlSystemGetCudaDriverVersion", "that of torch's build, or a constant")
def nvmlSystemGetCudaDriverVersion() -> int:
    """Return the version of CUDA: a thousand times the first number, and ten times the second."""
    _context()
    major, minor = map(int, cuda_version().split("."))
    return 1000 * major + 10 * minor


@_declared("nvmlSystemGetNVMLVersion", f"{DRIVER}")
def nvmlSystemGetNVMLVersion() -> str:
    """Return the version of the library, a constant."""
    _context()
    return f"12.{DRIVER}"


_NOT_MEASURED = (
    "nvmlDeviceGetUtilizationRates nvmlDeviceGetTemperature nvmlDeviceGetPowerUsage "
    "nvmlDeviceGetClockInfo nvmlDeviceGetMaxClockInfo nvmlDeviceGetFanSpeed "
    "nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetPowerManagementLimit "
    "nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetComputeRunningProcesses "
    "nvmlDeviceGetGraphicsRunningProcesses nvmlDeviceGetPersistenceMode nvmlDeviceGetComputeMode "
    "nvmlDeviceGetMigMode nvmlDeviceGetNvLinkState nvmlDeviceGetPcieThroughput "
    "nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetEccMode nvmlDeviceGetCpuAffinity "
    "nvmlDeviceGetEncoderUtilization nvmlDeviceGetDecoderUtilization nvmlDeviceGetPerformanceState"
)


def _not_measured(name: str) -> None:
    def function(*args: Any) -> None:
        _context()
        raise _error("NVML_ERROR_NOT_SUPPORTED")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = "Raise that the device does not support it: it is not measured."
    stands_in(f"pynvml.{name}", Fidelity.UNSUPPORTED, "not measured")(function)


for _name in _NOT_MEASURED.split():
    _not_measured(_name)


@_exact("nvmlErrorString")
def nvmlErrorString(result: int) -> str:
    """Return the text for a number of the library."""
    return _TEXTS.get(result, "Unknown Error")


# ---- NVIDIA's own module -------------------------------------------------------------------------


@later("pynvml", sees_scope=True)
def _patches_of_pynvml(module: ModuleType) -> list[Patch]:
    """Let the functions of an installed module answer for the devices of a scope."""
    if isinstance(module, StandInModule):
        return []
    names = [
        name
        for name, each in MODULES["pynvml"].items()
        if callable(each.value) and name.startswith("nvml")
    ]
    return [_patch(module, name) for name in names if callable(vars(module).get(name))]


def _patch(module: ModuleType, name: str) -> Patch:
    ours = MODULES["pynvml"][name].value

    def function(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if _shows_devices(context) else original(*args, **kwargs)

    return replaced_function(module, name, function, native_to="cuda")
