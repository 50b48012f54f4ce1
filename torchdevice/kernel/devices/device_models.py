"""Simulated devices by model: ``simulated:t4``, ``simulated:a100:8``, and models that a user describes.

A model is one of the profiles of :mod:`torchdevice.simulation.profiles` with figures of its own. They are the defaults
of the options ``capability``, ``memory``, ``context`` and ``properties``; an option that the call, a variable or a
configuration gives comes first, and memory that is given so is the program's alone. Every simulated device but a Mac
also implies ``identity="program"``, so that ``x.is_cuda`` is True.

:class:`DeviceProperties` is what ``get_device_properties`` returns: the fields, their defaults, and those that a scope
may set.

``gpus.py`` has the figures of :data:`MODELS`. Threads and shared memory are those of the compute capability. A field
that no source gives has the default of :class:`DeviceProperties`, which is 0 for a size.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import uuid as uuids
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from torchdevice.kernel.devices.gpus import GPUS, MAC_SIZES, OF_CAPABILITY, Gpu
from torchdevice.kernel.python import data_files, foreign_files

SIMULATED = "simulated"

SIMULATED_MAC = f"{SIMULATED}:mps", f"{SIMULATED}:mps:1"
"""The names of a simulated Mac as a target. A program that is written for CUDA runs on it as on a real Mac."""

TARGET = re.compile(SIMULATED + r"(?::([a-zA-Z][\w .-]*|[^{}]+\.(?:toml|json)|\{.*\}))?(?::([1-9][0-9]*))?", re.DOTALL)
"""The name of a simulated device as a target: the profile or model, or a file or JSON object with one; and a number."""


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A model of a device.

    Attributes:
        base: The profile whose rules hold: ``"cuda"``, ``"mps"`` or ``"strict"``.
        capability: The option of that name; None for its default.
        memory: The option of that name; None for no limit.
        context: The option of that name; None for no memory.
        properties: The option of that name.
        unsupported_dtypes: Names of dtypes that the device cannot hold, besides those of the profile.
        missing_operators: Operators of ATen that the device has no kernel for, besides those of the profile, such as
            ``"_fft_r2c"``. A name without an overload means all overloads.
    """

    base: str = "cuda"
    capability: Any = None
    memory: Any = None
    context: Any = None
    properties: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unsupported_dtypes: tuple[str, ...] = ()
    missing_operators: tuple[str, ...] = ()


def find(profile: str) -> DeviceModel | None:
    """Return the model that a target names, by its name, as a file or as a JSON object; None for a name without one.

    Raises:
        ValueError: The file cannot be read, or what it says is not a model.
    """
    if profile.startswith("{"):
        return _described(_parsed(json.loads, profile, "it"), "The description")
    if profile.endswith((".toml", ".json")):
        return _described(_read(profile), profile)
    return MODELS.get(known_name(profile))


def known_name(name: str) -> str:
    """Return the name of the model that a text means, in any case and spelling; the text where there is no such model.

    ``A100-80GB``, ``rtx 3090`` and ``NVIDIA GeForce RTX 3090`` are names, too.
    """
    return _NAMES_OF_MODELS.get(_spelling(name), name.lower())


def _spelling(name: str) -> str:
    """Return a name without what people write in several ways: case, spaces, hyphens and the maker's name."""
    return re.sub(r"^(nvidia|tesla|geforce|[\s_-])+|[\s_-]", "", name.lower())


def options_of(target: object) -> dict[str, Any]:
    """Return the options that a target implies: of each simulated device its identity, and the figures of its model."""
    found = TARGET.fullmatch(target) if isinstance(target, str) else None
    if found is None or target in SIMULATED_MAC:
        return {}
    model = (find(found[1]) if found[1] else None) or DeviceModel()
    figures = {name: getattr(model, name) for name in ("capability", "memory", "context", "properties")}
    return {"identity": "program", **{name: value for name, value in figures.items() if value not in (None, {})}}


_BARE = re.compile(r"([a-zA-Z][\w .-]*?)((?::[0-9]+)?)")
"""A target without ``simulated:`` before it: a name, and a number."""

_TYPES = ("cuda", "mps", "xpu", "cpu", SIMULATED)


def named(target: str) -> str:
    """Return the one spelling of a target, so that it means the same by each way in.

    Names may be in capitals. A model, or a profile that is no real device, needs no ``simulated:`` before it. A model
    gets its own name. Another text, such as one with the file of a model, is returned as it is.
    """
    kind, colon, rest = target.strip().partition(":")
    text = f"{SIMULATED}{colon}{rest}" if kind.lower() == SIMULATED else target.strip()
    bare = _BARE.fullmatch(text)
    if bare is not None:
        name, number = known_name(bare[1]), bare[2]
        if name in _TYPES:
            return f"{name}{number}"
        return f"{SIMULATED}:{name}{number}" if name == "strict" or name in MODELS else target
    found = TARGET.fullmatch(text)
    if found is None or not found[1] or found[1].startswith("{") or _is_file(found[1]):
        return target
    return f"{SIMULATED}:{known_name(found[1])}" + _number(found[2])


def canonical(target: str) -> str:
    """Return the spelling of :func:`named` with a file's whole path, which other folders' processes need."""
    target = named(target)
    found = TARGET.fullmatch(target)
    if found is None or not found[1] or not _is_file(found[1]):
        return target
    return f"{SIMULATED}:{os.path.abspath(found[1])}" + _number(found[2])


def _is_file(model: str) -> bool:
    return model.endswith((".toml", ".json"))


def _number(digits: str | None) -> str:
    """Return the end of a target's name that has a number of devices; nothing without one."""
    return f":{digits}" if digits else ""


_LARGEST = 1 << 20
"""The greatest size of a description in bytes."""


def _read(path: str) -> Any:
    try:
        text = foreign_files.read(path, _LARGEST).decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path!r} cannot be read: {error.strerror}. Name a file with a device's figures.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path!r} is not UTF-8: {error}. Write the file in UTF-8.") from None
    return _parsed(json.loads if path.endswith(".json") else data_files.toml, text, repr(path))


def _parsed(parse: Any, text: str, name: str) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The description of the device: {name} cannot be parsed: {error}. Correct it.") from None


def _described(found: Any, name: str) -> DeviceModel:
    known = [field.name for field in dataclasses.fields(DeviceModel)]
    unknown = sorted(found.keys() - set(known)) if isinstance(found, Mapping) else [found]
    if unknown:
        raise ValueError(f"{name} has {unknown[0]!r}, which is not known. Use keys among {', '.join(known)}.")
    for key, (fits, wanted) in _VALUES.items():
        if key in found and not fits(found[key]):
            raise ValueError(f"{name} has {key}={found[key]!r}, which is not {wanted}. Write {key} as {wanted}.")
    lists = {name: tuple(found[name]) for name in ("unsupported_dtypes", "missing_operators") if name in found}
    return DeviceModel(**{**found, **lists})


_NAMES = (
    lambda value: isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value),
    'a list of names, such as ["float64"]',
)

_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "base": (lambda value: isinstance(value, str), "the name of a profile"),
    "properties": (lambda value: isinstance(value, Mapping), "a table of figures"),
    "unsupported_dtypes": _NAMES,
    "missing_operators": _NAMES,
}
"""Which values a key may have, and how to call them. The other keys are options, which check theirs."""

CONTEXT = 1 << 29
"""The memory that CUDA and its libraries take of a GPU for themselves, in bytes: half a GiB is usual."""


def _model(gpu: Gpu) -> DeviceModel:
    properties = {**gpu.properties, **OF_CAPABILITY[gpu.capability]}
    return DeviceModel(capability=gpu.capability, memory=gpu.memory, context=CONTEXT, properties=properties)


MODELS: Mapping[str, DeviceModel] = {name: _model(gpu) for name, gpu in GPUS.items()}

_NAMES_OF_MODELS = {
    _spelling(each): name
    for name, gpu in reversed([*GPUS.items()])  # of models with the same name of torch the first one counts
    for each in (gpu.properties["name"], name, *gpu.aliases)
}

MACS: Mapping[int, int] = {
    size: (size << 30) * (2 if size < 36 else 3) // (3 if size < 36 else 4) for size in MAC_SIZES
}
"""Unified memory of a Mac in GB -> the bytes of it that Metal recommends to use at most."""

CAPABILITY = (8, 0)
"""CUDA's compute capability where a scope names none."""


_PROPERTIES_OF_CUDA = (
    "_CudaDeviceProperties(name='{0.name}', major={0.major}, minor={0.minor}, total_memory={1}MB, "
    "multi_processor_count={0.multi_processor_count}, uuid={0.uuid}, L2_cache_size={2}MB)"
)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class DeviceProperties:
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
        return _PROPERTIES_OF_CUDA.format(self, self.total_memory // 2**20, self.L2_cache_size // 2**20)


_PROPERTIES_OF_XPU = (
    "_XpuDeviceProperties(name='{0.name}', platform_name='{0.platform_name}', type='{0.type}', "
    "total_memory={1}MB, max_compute_units={0.max_compute_units}, uuid={0.uuid}, "
    "has_fp64={0.has_fp64:d})"
)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class XpuDeviceProperties:
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
