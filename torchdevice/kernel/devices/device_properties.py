"""The result of ``get_device_properties``: fields, defaults, and fields that a scope may set."""

from __future__ import annotations

import dataclasses
import uuid as uuids
from collections.abc import Mapping
from typing import Any, get_type_hints

CAPABILITY = (8, 0)
"""CUDA's compute capability where a scope names none."""


_PROPERTIES_OF_CUDA = (
    "_CudaDeviceProperties(name='{0.name}', major={0.major}, minor={0.minor}, total_memory={1}MB, "
    "multi_processor_count={0.multi_processor_count}, uuid={0.uuid}, L2_cache_size={2}MB)"
)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class DeviceProperties:
    """The fields of torch's own ``_CudaDeviceProperties``.

    A field that is not measured is a documented constant (fidelity *declared*): the value for
    compute capability 8.0 in the table "Technical Specifications per Compute Capability" of
    NVIDIA's CUDA C++ Programming Guide, or 0 where the value would describe a particular chip.

    Attributes:
        name: The name of the target.
        major: Compute capability, major; the scope's ``capability``.
        minor: Compute capability, minor.
        total_memory: Bytes of the target's memory.
        multi_processor_count: The number of units that compute in parallel; on a CPU the number of
            torch's threads.
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
    is_multi_gpu_board: int = 0
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 166912
    shared_memory_per_multiprocessor: int = 167936
    clock_rate: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    L2_cache_size: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""

    def __repr__(self) -> str:
        return _PROPERTIES_OF_CUDA.format(
            self, self.total_memory // 2**20, self.L2_cache_size // 2**20
        )


_PROPERTIES_OF_XPU = (
    "_XpuDeviceProperties(name='{0.name}', platform_name='{0.platform_name}', type='{0.type}', "
    "total_memory={1}MB, max_compute_units={0.max_compute_units}, uuid={0.uuid}, "
    "has_fp64={0.has_fp64:d})"
)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class XpuDeviceProperties:
    """The fields of ``_XpuDeviceProperties``, returned by ``torch.xpu.get_device_properties``.

    A field that is not measured is a documented constant (fidelity *declared*): a limit or a
    feature that all of Intel's GPUs for data centers have, or 0 or an empty text where the value
    would describe a particular chip or driver.

    Attributes:
        name: The name of the target.
        total_memory: Bytes of the target's memory.
        max_compute_units: The number of units that compute in parallel; on a CPU the number of
            torch's threads.
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
    platform_name: str = "Intel(R) oneAPI Unified Runtime over Level-Zero"
    vendor: str = "Intel(R) Corporation"
    type: str = "gpu"
    device_id: int = 0
    driver_version: str = ""
    version: str = ""
    gpu_eu_count: int = 0
    gpu_subslice_count: int = 0
    max_work_group_size: int = 1024
    max_num_sub_groups: int = 64
    sub_group_sizes: tuple[int, ...] = (16, 32)
    local_mem_size: int = 131072
    last_level_cache_size: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    architecture: int = 0
    has_fp16: bool = True
    has_atomic64: bool = True
    has_bfloat16_conversions: bool = True
    has_subgroup_matrix_multiply_accumulate: bool = True
    has_subgroup_matrix_multiply_accumulate_tensor_float32: bool = True
    has_subgroup_2d_block_io: bool = True

    def __repr__(self) -> str:
        return _PROPERTIES_OF_XPU.format(self, self.total_memory // 2**20)


SETTABLE: Mapping[str, type] = {
    name: kind
    for name, kind in get_type_hints(DeviceProperties).items()
    if name not in ("major", "minor")
}
"""The fields that a scope's ``properties`` may set, and their types."""


def checked(properties: Any) -> dict[str, Any]:
    """Return the fields of :class:`DeviceProperties` to set, as a dictionary.

    Raises:
        TypeError: ``properties`` is not a mapping, or a value has another type than its field.
        ValueError: A field does not exist or cannot be set, or a size is below 0.
    """
    if not isinstance(properties, Mapping):
        raise TypeError(
            f"properties={properties!r} is not a mapping. Use a dict such as {{'name': 'a GPU'}}."
        )
    unknown = sorted(map(str, properties.keys() - SETTABLE.keys()))
    if unknown:
        raise ValueError(
            f"properties={properties!r} has {unknown!r}, which cannot be set. Use fields of "
            f"torch.cuda.get_device_properties: {', '.join(sorted(SETTABLE))}; capability= sets "
            "major and minor."
        )
    return {name: _checked_field(name, value) for name, value in properties.items()}


def _checked_field(name: str, value: Any) -> Any:
    wanted: Any = SETTABLE[name]
    if wanted is uuids.UUID and isinstance(value, str):
        return uuids.UUID(value)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise TypeError(
            f"properties[{name!r}]={value!r} is not of type {wanted.__name__}. Use a value of that "
            "type."
        )
    if wanted is int and value < 0:
        raise ValueError(f"properties[{name!r}]={value!r} is below 0. Use 0 or more.")
    return value
