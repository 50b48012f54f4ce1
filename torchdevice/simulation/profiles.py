"""Operators and dtypes that each simulated device lacks, as data from named sources.

- ``cuda``: no dtype. CUDA has a kernel for most operators for which the CPU has one; its refusals
of the others are in ``device_refusals.py``.
- ``mps``: float8, float64 and complex128 (torch/testing/_internal/common_mps.py and the texts torch
  raises), and the operators that torch's own table gives neither an MPS kernel nor a composite one.
- ``strict``: everything that ``cuda`` or ``mps`` lacks, without a fallback to the CPU. A program
  that runs on it needs nothing that either of the two lacks.

The table is torchgen/packaged/ATen/native/native_functions.yaml, which every torch wheel carries. A
profile or a model of a device lists what else it lacks (``simulation/gpu_models.py``). A real
device's operators without a kernel are those that are not registered with torch, see
``calls/lacking/missing_operators.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchdevice.simulation import model_lookup

_DELEGATE = re.compile(r"\n  structured_delegate: ([\w.]+)")
_DISPATCH = re.compile(r"\n    ([A-Z][\w, ]+):")


class _Entry:
    """The entry of one operator in torch's table.

    Args:
        text: The entry's lines, each but the first with two spaces before its key.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.checks_devices = "\n  device_check: NoCheck" not in text
        self.structured = "\n  structured: True" in text

    @functools.cached_property
    def delegate(self) -> str | None:
        found = _DELEGATE.search(self._text)
        return found[1] if found else None

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """The dispatch keys that it has kernels for."""
        named = frozenset(
            key.strip() for keys in _DISPATCH.findall(self._text) for key in keys.split(",")
        )
        generated = "\n  ufunc_inner_loop:" in self._text  # for these two
        return named | {"CPU", "CUDA"} if generated else named


@functools.cache
def missing_operators(backend: str) -> Mapping[str, str]:
    """Return operators without a kernel for a backend: full name -> the name torch reports.

    An operator without dispatch keys, or with a composite kernel, is made of other operators and
    needs no kernel.

    Raises:
        FileNotFoundError: The installed torch does not carry its table of operators.
    """
    table = _table()
    keys = {name: table[_reported(name)].keys for name in table}
    return {
        name: table[name].delegate or name for name, each in keys.items() if _lacks(each, backend)
    }


def _reported(name: str) -> str:
    """Return the entry of an operator's kernels: its structured delegate's, or its own."""
    delegate = _table()[name].delegate
    return delegate if delegate is not None and delegate in _table() else name


def _lacks(keys: frozenset[str], backend: str) -> bool:
    return (
        bool(keys) and backend not in keys and not any(key.startswith("Composite") for key in keys)
    )


@functools.cache
def missing_functions(backend: str) -> Mapping[str, str]:
    """Return operators of whose overloads none has a kernel: name -> the name torch reports."""
    missing = missing_operators(backend)
    present = {name.partition(".")[0] for name in _table() if name not in missing}
    return {
        name: reported
        for overload, reported in missing.items()
        if (name := overload.partition(".")[0]) not in present
    }


def is_cpu_only(name: str) -> bool:
    """Return whether a dense operator, by full name, has a kernel for the CPU and not for CUDA.

    Those that the CPU's own kernels are split into, and those that compilers put into graphs and
    replace, are left out.
    """
    table = _table()
    if name not in table or "_for_cpu" in name or name in _WITHIN_COMPILED_GRAPHS:
        return False
    keys = table[_reported(name)].keys
    return "CPU" in keys and _lacks(keys, "CUDA")


@functools.cache
def cpu_only_sparse_operators() -> frozenset[str]:
    """Return the operators on compressed sparse tensors that only the CPU has a kernel for."""
    keys = {name: entry.keys for name, entry in _table().items()}
    return frozenset(
        name
        for name, each in keys.items()
        if "SparseCsrCPU" in each and "SparseCsrCUDA" not in each
    )


_WITHIN_COMPILED_GRAPHS = {"_functional_assert_async.msg", "_make_dep_token"}


@functools.cache
def unchecked_operators() -> frozenset[str]:
    """Return operators whose CUDA wrapper leaves the check of devices to the tensor iterator."""
    return frozenset(name for name, entry in _table().items() if not entry.checks_devices)


def is_structured(name: str) -> bool:
    """Return whether an operator, by full name, is structured or delegates to one that is."""
    entry = _table().get(name)
    return entry is not None and (entry.structured or entry.delegate is not None)


@functools.cache
def _table() -> Mapping[str, _Entry]:
    """Read torch's operator table as text: a YAML parser is slow and another dependency."""
    path = (
        Path(torch.__file__).parent.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    )
    return {
        entry.partition("(")[0]: _Entry(entry) for entry in path.read_text().split("\n- func: ")[1:]
    }


_DTYPE_MISSING_ON_MPS = (
    "Cannot convert a MPS Tensor to {name} dtype as the MPS framework doesn't support {name}. "
    "Please use {other} instead."
)


@dataclass(frozen=True)
class Profile:
    """A kind of device to simulate.

    Attributes:
        name: The profile's name in a target, as in ``simulated:mps``.
        backends: Dispatch keys of torch's backends. The device lacks every operator that one of
            these backends lacks.
        accelerator: The device type that programs spell for the device.
        unsupported_dtypes: Dtypes that the device cannot hold.
        single: Whether a machine never has more than one such device.
        refuses: Whether an operator that the device lacks always raises, without a fallback to the
            CPU.
        stands_for_cuda: Whether the device raises CUDA's errors.
        operators: Further operators that the device lacks, with or without an overload.
        most_dimensions: How many dimensions a tensor may have (aten/src/ATen/mps/EmptyTensor.cpp);
            None for torch's own limit.
    """

    name: str
    backends: tuple[str, ...] = ()
    accelerator: str = "cuda"
    unsupported_dtypes: frozenset[torch.dtype] = field(default_factory=frozenset)
    single: bool = False
    refuses: bool = False
    stands_for_cuda: bool = False
    operators: frozenset[str] = frozenset()
    most_dimensions: int | None = None

    @property
    def lacks_anything(self) -> bool:
        """Whether there is a dtype or an operator that the device lacks."""
        return bool(self.backends or self.unsupported_dtypes or self.operators)

    def missing(self, op: Any) -> str | None:
        """Return a missing operator's name in the device's error; None if it is not missing."""
        name = op._schema.name.removeprefix("aten::")
        overload = op.name().removeprefix("aten::")
        if self.operators and not self.operators.isdisjoint((name, overload)):
            return f"aten::{overload}"
        for backend in self.backends:
            found = missing_operators(backend).get(overload)
            if found is not None:
                return f"aten::{found}"
        return None

    def dtype_message(self, dtype: torch.dtype) -> str:
        """Return torch's error text for a dtype that Metal lacks (ATen/mps/EmptyTensor.cpp)."""
        name = str(dtype).removeprefix("torch.")
        if dtype in FLOAT8 or dtype is torch.complex128:
            kind = "ComplexDouble" if dtype.is_complex else name.capitalize()
            return (
                f"Trying to convert {kind} to the MPS backend but it does not have support for "
                "that dtype."
            )
        other = "float32" if dtype.is_floating_point else "complex64"
        return _DTYPE_MISSING_ON_MPS.format(name=name, other=other)


FLOAT8 = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


_NOT_ON_METAL = frozenset({torch.float64, torch.complex128}) | FLOAT8


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("cuda", stands_for_cuda=True),
        Profile(
            "mps",
            backends=("MPS",),
            accelerator="mps",
            unsupported_dtypes=_NOT_ON_METAL,
            single=True,
            most_dimensions=16,
        ),
        Profile(
            "strict",
            backends=("MPS",),
            unsupported_dtypes=_NOT_ON_METAL,
            refuses=True,
            stands_for_cuda=True,
        ),
    )
}


_MISSING_ON_CUDA = (
    "Could not run '{operator}' with arguments from the '{backend}' backend. This could be because "
    "the operator doesn't exist for this backend, or was omitted during the selective/custom build "
    "process (if using custom build). If you are a Facebook employee using PyTorch on mobile, "
    "please visit https://fburl.com/ptmfixes for possible resolutions. '{operator}' is only "
    "available for these backends: [{cpu}]."
)


def missing_on_cuda(operator: str, backend: str = "CUDA") -> str:
    """Return torch's text for an operator that CUDA lacks (dispatch/OperatorEntry.cpp)."""
    cpu = backend.replace("CUDA", "CPU").replace("MPS", "CPU")
    return _MISSING_ON_CUDA.format(operator=operator, backend=backend, cpu=cpu)


def find(name: str) -> Profile | None:
    """Return the profile of a name, or the one that a model of a device is made from.

    Raises:
        ValueError: The model is not a valid one.
    """
    if name in PROFILES:
        return PROFILES[name]
    several = model_lookup.listed(name)
    if several is not None:
        # All models of GPUs have the operators and dtypes of this profile.
        if model_lookup.MODELS.keys() >= set(several):
            return dataclasses.replace(PROFILES["cuda"], name=name)
        return None
    model = model_lookup.find(name)
    if model is None:
        return None
    if model.base not in PROFILES:
        known = ", ".join(map(repr, PROFILES))
        raise ValueError(f"{name}: base={model.base!r} is not a profile. Use one of {known}.")
    dtypes = frozenset(_dtype(each, name) for each in model.unsupported_dtypes)
    base = PROFILES[model.base]
    return dataclasses.replace(
        base,
        name=name,
        unsupported_dtypes=base.unsupported_dtypes | dtypes,
        operators=frozenset(
            operator.removeprefix("aten::") for operator in model.missing_operators
        ),
    )


def _dtype(name: str, model: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"{model}: unsupported_dtypes has {name!r}, which is not a dtype. Use names such as "
            "'float64'."
        )
    return found
