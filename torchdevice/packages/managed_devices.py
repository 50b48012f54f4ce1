"""A scope's devices as NVIDIA's management library counts them: all, visible or not."""

from __future__ import annotations

import dataclasses
import uuid

from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.options import Options, PerDevice, of_device


@dataclasses.dataclass(frozen=True)
class ManagedDevice:
    """One device of a scope.

    Attributes:
        index: Its number among all devices, whatever ``CUDA_VISIBLE_DEVICES`` says.
        there: The number of the target's device that it is.
        name: As ``torch.cuda.get_device_name`` returns it.
        uuid: Its identifier, which is computed from its name and number.
        bus: Its place on the PCI bus: the first after the processor's, in the order of the numbers.
        total: The bytes of its memory.
    """

    index: int
    there: int
    name: str
    uuid: str
    bus: str
    total: int


def count(options: Options, runtime: Runtime) -> int:
    """Return the number of devices of a scope."""
    return options.devices or max(1, runtime.device_count())


def device(options: Options, runtime: Runtime, index: int) -> ManagedDevice:
    """Return a device of a scope."""
    given = of_device(options.properties, index) or {}
    there = index if index < runtime.device_count() else 0
    name = given.get("name") or runtime.name(there)
    identifier = given.get("uuid") or uuid.uuid5(uuid.NAMESPACE_OID, f"{name}:{index}")
    memory = getattr(options, "memory", None)  # an option of a feature
    measured = memory[index] if isinstance(memory, PerDevice) else runtime.total_memory(there)
    total, bus = given.get("total_memory") or measured, f"00000000:{index + 1:02X}:00.0"
    return ManagedDevice(index, there, name, f"GPU-{identifier}", bus, total)
