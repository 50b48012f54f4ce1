"""Simulated devices by model: ``simulated:t4``, ``simulated:a100:8``, and users' own models.

``simulated:t4,a100:2`` is a machine with a T4 and two A100, whose options have a value for each
device.

A model is one of the profiles of :mod:`torchdevice.simulation.profiles` with figures of its own.
They are the defaults of the options ``capability``, ``memory``, ``context`` and ``properties``; an
option that the call, a variable or a configuration gives comes first, and memory that is given so
is the program's alone. Every simulated device but a Mac also implies ``identity="program"``, so
that ``x.is_cuda`` is True.

``gpu_models.py`` has the figures of :data:`MODELS`. Threads and shared memory are those of the
compute capability. A field that no source gives has the default of ``DeviceProperties``, which is 0
for a size.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from torchdevice.kernel.options import PerDevice
from torchdevice.kernel.python import data_files, foreign_files
from torchdevice.simulation.gpu_models import GPUS, MAC_SIZES, OF_CAPABILITY, Gpu

SIMULATED = "simulated"

SIMULATED_MAC = f"{SIMULATED}:mps", f"{SIMULATED}:mps:1"
"""The names of a simulated Mac as a target. A program that is written for CUDA runs on it as on a
real Mac.
"""

_NAME, _COUNT = r"[a-zA-Z][\w .-]*", r"(?::[1-9][0-9]*)?"

_LIST = rf"{_NAME}{_COUNT}(?:,\s*{_NAME}{_COUNT})+"
"""Names of models, each with a number of devices: ``t4,a100:2``."""

TARGET = re.compile(
    rf"{SIMULATED}(?::({_LIST}|{_NAME}|[^{{}}]+\.(?:toml|json)|\{{.*\}}))?(?::([1-9][0-9]*))?",
    re.DOTALL,
)
"""The name of simulated devices as a target: the profile or model, or a file or JSON object with
one; and a number.

A list of models is one group, with its numbers.
"""


_kept = functools.lru_cache(maxsize=64)
"""Keeps the results for the names that a program uses: each scope that is made looks them up."""


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A model of a device.

    Attributes:
        base: The profile whose rules hold: ``"cuda"``, ``"mps"`` or ``"strict"``.
        capability: The option of that name; None for its default.
        memory: The option of that name; None for its default.
        context: The option of that name; None for no memory.
        properties: The option of that name.
        unsupported_dtypes: Names of dtypes that the device cannot hold, besides those of the
            profile.
        missing_operators: Operators of ATen that the device has no kernel for, besides those of the
            profile, such as ``"_fft_r2c"``. A name without an overload means all overloads.
    """

    base: str = "cuda"
    capability: Any = None
    memory: Any = None
    context: Any = None
    properties: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unsupported_dtypes: tuple[str, ...] = ()
    missing_operators: tuple[str, ...] = ()


def find(profile: str) -> DeviceModel | None:
    """Return a target's model, by name, file or JSON object; None for a name without one.

    Raises:
        ValueError: The file cannot be read, or describes no model.
    """
    if profile.startswith("{"):
        return _described(_parsed(json.loads, profile, "it"), "The description")
    if profile.endswith((".toml", ".json")):
        return _described(_read(profile), profile)
    return MODELS.get(known_name(profile))


@_kept
def known_name(name: str) -> str:
    """Return the name of a model for any case and spelling; the text itself for no known model.

    ``A100-80GB``, ``rtx 3090`` and ``NVIDIA GeForce RTX 3090`` are names, too.
    """
    return _NAMES_OF_MODELS.get(_spelling(name), name.lower())


@_kept
def listed(profile: str) -> tuple[str, ...] | None:
    """Return the model of each device in a list such as ``t4,a100:2``; None for other targets."""
    if re.fullmatch(_LIST, profile) is None or _is_file(profile):
        return None
    found: list[str] = []
    for each in profile.split(","):
        name, _, number = each.strip().partition(":")
        found += [known_name(name)] * int(number or 1)
    return tuple(found)


@_kept
def count_of(target: str) -> int | None:
    """Return the number of devices in a simulated device's name; None if it has none."""
    found = TARGET.fullmatch(target)
    models = listed(found[1]) if found is not None and found[1] else None
    if models is not None:
        return len(models)
    return int(found[2]) if found is not None and found[2] else None


def _spelling(name: str) -> str:
    """Return a name without the maker, case, spaces and hyphens, which people write variously."""
    return re.sub(r"^(nvidia|tesla|geforce|[\s_-])+|[\s_-]", "", name.lower())


def options_of(target: object) -> dict[str, Any]:
    """Return the options a target implies: per simulated device, identity and model figures."""
    found = TARGET.fullmatch(target) if isinstance(target, str) else None
    if found is None or target in SIMULATED_MAC:
        return {}
    several = listed(found[1]) if found[1] else None
    if several is not None:
        devices = [MODELS[each] for each in several if each in MODELS]
        return {
            "identity": "program",
            "context": CONTEXT,
            **{name: PerDevice(getattr(each, name) for each in devices) for name in _DIFFERENT},
        }
    model = (find(found[1]) if found[1] else None) or DeviceModel()
    figures = {name: getattr(model, name) for name in (*_DIFFERENT, "context")}
    return {
        "identity": "program",
        **{name: value for name, value in figures.items() if value not in (None, {})},
    }


_DIFFERENT = ("capability", "memory", "properties")
"""The options that differ between the devices of a machine with several models."""


_BARE = re.compile(r"([a-zA-Z][\w .-]*?)((?::[0-9]+)?)")
"""A target without ``simulated:`` before it: a name, and a number. A list has several."""

_TYPES = ("cuda", "mps", "xpu", "cpu", SIMULATED)


@_kept
def named(target: str) -> str:
    """Return the one spelling of a target, so that it means the same by each way in.

    Names may be in capitals. A model, or a profile that is no real device, needs no ``simulated:``
    before it. A model gets its own name. Another text, such as one with the file of a model, is
    returned as it is.
    """
    kind, colon, rest = target.strip().partition(":")
    text = f"{SIMULATED}{colon}{rest}" if kind.lower() == SIMULATED else target.strip()
    several = text.removeprefix(f"{SIMULATED}:")
    if listed(several) is not None:
        return _named_list(several) or target
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


def simulated(target: str) -> str | None:
    """Return the one spelling of the name of a simulated device; None for another target."""
    found = named(target)
    return found if found.startswith(SIMULATED) else None


def _named_list(text: str) -> str:
    """Return the canonical target for a list of models; nothing if a model is unknown."""
    parts = [each.strip().partition(":") for each in text.split(",")]
    names = [known_name(name) for name, _, _ in parts]
    if not MODELS.keys() >= set(names):
        return ""
    pairs = zip(names, parts, strict=True)
    spelled = ",".join(f"{name}{colon}{number}" for name, (_, colon, number) in pairs)
    return f"{SIMULATED}:{spelled}"


def canonical(target: str) -> str:
    """Return the spelling of :func:`named` with a file's full path, for processes elsewhere."""
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
        raise ValueError(
            f"{path!r} cannot be read: {error.strerror}. Name a file with a device's figures."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path!r} is not UTF-8: {error}. Write the file in UTF-8.") from None
    return _parsed(json.loads if path.endswith(".json") else data_files.toml, text, repr(path))


def _parsed(parse: Any, text: str, name: str) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"The description of the device: {name} cannot be parsed: {error}. Correct it."
        ) from None


def _described(found: Any, name: str) -> DeviceModel:
    known = [field.name for field in dataclasses.fields(DeviceModel)]
    unknown = sorted(found.keys() - set(known)) if isinstance(found, Mapping) else [found]
    if unknown:
        raise ValueError(
            f"{name} has {unknown[0]!r}, which is not known. Use keys among {', '.join(known)}."
        )
    for key, (fits, wanted) in _VALUES.items():
        if key in found and not fits(found[key]):
            raise ValueError(
                f"{name} has {key}={found[key]!r}, which is not {wanted}. Write {key} as {wanted}."
            )
    lists = {
        name: tuple(found[name])
        for name in ("unsupported_dtypes", "missing_operators")
        if name in found
    }
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
"""Which values a key may have, and how to call them. The other keys are options, which check
theirs.
"""

CONTEXT = 1 << 29
"""The memory that CUDA and its libraries take of a GPU for themselves, in bytes: half a GiB is
usual.
"""


def _model(gpu: Gpu) -> DeviceModel:
    properties = {**gpu.properties, **OF_CAPABILITY[gpu.capability]}
    return DeviceModel(
        capability=gpu.capability, memory=gpu.memory, context=CONTEXT, properties=properties
    )


MODELS: Mapping[str, DeviceModel] = {name: _model(gpu) for name, gpu in GPUS.items()}

_NAMES_OF_MODELS = {
    _spelling(each): name
    # Of models with the same name of torch the first one counts.
    for name, gpu in reversed([*GPUS.items()])
    for each in (gpu.properties["name"], name, *gpu.aliases)
}

MACS: Mapping[int, int] = {
    size: (size << 30) * (2 if size < 36 else 3) // (3 if size < 36 else 4) for size in MAC_SIZES
}
"""Unified memory of a Mac in GB -> the bytes of it that Metal recommends to use at most."""
