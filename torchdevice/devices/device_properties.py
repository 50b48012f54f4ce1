"""What ``get_device_properties`` returns: the fields, their defaults, and those that a scope may set."""

from __future__ import annotations

import dataclasses
import uuid as uuids
from collections.abc import Mapping
from typing import Any, get_type_hints

from torchdevice.foundation import data_files
from torchdevice.foundation.torch_texts import text

_TABLE = data_files.read(__file__, "device_properties.json")

CAPABILITY: tuple[int, int] = tuple(_TABLE["capability"])
"""CUDA's compute capability where a scope names none."""


def _constants(name: str) -> Any:
    """Return a class with the fields that are documented constants."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in _TABLE[name].items()}
    fields = [(name, type(value), dataclasses.field(default=value)) for name, value in values.items()]
    return dataclasses.make_dataclass(name, fields, frozen=True, repr=False, eq=False, kw_only=True)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class DeviceProperties(_constants("_CudaDeviceProperties")):  # type: ignore[misc]
    """The fields of torch's own ``_CudaDeviceProperties``.

    A field that is not measured is a documented constant (fidelity *declared*): the value for compute capability 8.0
    in the table "Technical Specifications per Compute Capability" of NVIDIA's CUDA C++ Programming Guide, or 0 where
    the value would describe a particular chip.

    Attributes:
        name: The name of the target.
        major: Compute capability, major; the scope's ``capability``.
        minor: Compute capability, minor.
        total_memory: Bytes of the target's memory.
        multi_processor_count: The number of units that compute in parallel; on a CPU the number of torch's threads.
        uuid: Computed from the name and the ordinal. It is not the identifier of a GPU.
        is_integrated: 1 if the target computes in the host's memory, else 0.
        L2_cache_size: Bytes; 0, because it is not measured.
    """

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: uuids.UUID
    is_integrated: int

    def __repr__(self) -> str:
        return text("properties of CUDA", self, self.total_memory // 2**20, self.L2_cache_size // 2**20)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class XpuDeviceProperties(_constants("_XpuDeviceProperties")):  # type: ignore[misc]
    """The fields of torch's own ``_XpuDeviceProperties``, which ``torch.xpu.get_device_properties`` returns.

    A field that is not measured is a documented constant (fidelity *declared*): a limit or a feature that all of
    Intel's GPUs for data centers have, or 0 or an empty text where the value would describe a particular chip or
    driver.

    Attributes:
        name: The name of the target.
        total_memory: Bytes of the target's memory.
        max_compute_units: The number of units that compute in parallel; on a CPU the number of torch's threads.
        has_fp64: Whether the target holds float64.
        is_integrated_gpu: Whether the target computes in the host's memory.
        uuid: Computed from the name and the ordinal. It is not the identifier of a GPU.
    """

    name: str
    total_memory: int
    max_compute_units: int
    has_fp64: bool
    is_integrated_gpu: bool
    uuid: uuids.UUID

    def __repr__(self) -> str:
        return text("properties of XPU", self, self.total_memory // 2**20)


SETTABLE: Mapping[str, type] = {
    name: kind for name, kind in get_type_hints(DeviceProperties).items() if name not in ("major", "minor")
}
"""The fields that a scope's ``properties`` may set, and their types."""


def checked(properties: Any) -> dict[str, Any]:
    """Return the fields of :class:`DeviceProperties` to set, as a dictionary.

    Raises:
        TypeError: ``properties`` is not a mapping, or a value has another type than its field.
        ValueError: A field does not exist or cannot be set, or a size is below 0.
    """
    if not isinstance(properties, Mapping):
        raise TypeError(f"properties={properties!r} is not a mapping. Use a dict such as {{'name': 'a GPU'}}.")
    unknown = sorted(map(str, properties.keys() - SETTABLE.keys()))
    if unknown:
        raise ValueError(
            f"properties={properties!r} has {unknown!r}, which cannot be set. Use fields of "
            f"torch.cuda.get_device_properties: {', '.join(sorted(SETTABLE))}; capability= sets major and minor."
        )
    return {name: _checked_field(name, value) for name, value in properties.items()}


def _checked_field(name: str, value: Any) -> Any:
    wanted: Any = SETTABLE[name]
    if wanted is uuids.UUID and isinstance(value, str):
        return uuids.UUID(value)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise TypeError(f"properties[{name!r}]={value!r} is not of type {wanted.__name__}. Use a value of that type.")
    if wanted is int and value < 0:
        raise ValueError(f"properties[{name!r}]={value!r} is below 0. Use 0 or more.")
    return value
