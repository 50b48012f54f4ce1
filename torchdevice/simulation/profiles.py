"""What the devices that are simulated lack, as data from named sources.

- ``cuda``: nothing. CUDA has a kernel for what the CPU has one for, save a few named in CUDA's own table.
- ``mps``: float64 and complex128 (torch/testing/_internal/common_mps.py and the text torch raises), and the operators
  that torchgen/packaged/ATen/native/native_functions.yaml, which every torch wheel carries, gives neither an MPS kernel
  nor a composite one.
- ``strict``: everything that ``cuda`` or ``mps`` lacks, and no way around it: a program that runs here needs nothing
  that one of them does not have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_COMPOSITE = re.compile(r"\bComposite\w+")


_FUNCTION = re.compile(r"- func: ([\w.]+)\(")


_DISPATCH = re.compile(r"    ([A-Z][\w, ]+):")


@dataclass(frozen=True)
class Profile:
    """A kind of device to simulate.

    Attributes:
        name: What it is asked for by.
        backends: The dispatch keys of torch's own backends whose operators it has; it lacks what one of them lacks.
        accelerator: The accelerator that programs spell for it.
        unsupported_dtypes: Dtypes it cannot hold.
        single: Whether there is only ever one.
        refuses: Whether an operator that it lacks is always an error.
    """

    name: str
    backends: tuple[str, ...] = ()
    accelerator: str = "cuda"
    unsupported_dtypes: frozenset[torch.dtype] = field(default_factory=frozenset)
    single: bool = False
    refuses: bool = False

    def missing(self, op: Any) -> str | None:
        """Return the name of the operator as the device's error gives it if the device lacks it, else None."""
        name = op._schema.name.removeprefix("aten::")
        overload = f"{name}.{op._overloadname}" if op._overloadname != "default" else name
        for backend in self.backends:
            found = missing_operators(backend).get(overload)
            if found is not None:
                return f"aten::{found}"
        return None

    def missing_message(self, operator: str) -> str:
        """Return what torch raises for an operator without a kernel: aten/src/ATen/mps/MPSFallback.mm."""
        return (
            f"The operator '{operator}' is not currently implemented for the MPS device. If you want this op to be "
            f"considered for addition please comment on https://github.com/pytorch/pytorch/issues/141287 and mention "
            f"use-case, that resulted in missing op as well as commit hash {torch.version.git_version}. As a temporary "
            f"fix, you can set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback "
            f"for this op. WARNING: this will be slower than running natively on MPS."
        )

    def dtype_message(self, dtype: torch.dtype) -> str:
        """Return what torch raises for a dtype that Metal lacks: aten/src/ATen/mps/EmptyTensor.cpp."""
        name = str(dtype).removeprefix("torch.")
        return (
            f"Cannot convert a MPS Tensor to {name} dtype as the MPS framework doesn't support {name}. "
            f"Please use {'float32' if dtype.is_floating_point else 'complex64'} instead."
        )


_NOT_ON_METAL = frozenset({torch.float64, torch.complex128})


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("cuda"),
        Profile("mps", backends=("MPS",), accelerator="mps", unsupported_dtypes=_NOT_ON_METAL, single=True),
        Profile("strict", backends=("MPS",), unsupported_dtypes=_NOT_ON_METAL, refuses=True),
    )
}


class _Entry:
    """What torch's table says of one operator."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.delegate: str | None = None
        self.structured = False
        self.checks_devices = True


@functools.cache
def missing_operators(backend: str) -> Mapping[str, str]:
    """Return the operators without a kernel for a backend: name with overload -> the name that torch reports.

    An operator without dispatch keys, or with a composite one, is composed of others.

    Raises:
        FileNotFoundError: The installed torch does not carry its table of operators.
    """
    table = _table()
    found = {}
    for name, entry in table.items():
        reported = entry.delegate or name
        keys = table[reported].keys if reported in table else entry.keys
        if keys and backend not in keys and not any(_COMPOSITE.fullmatch(key) for key in keys):
            found[name] = reported
    return found


@functools.cache
def unchecked_operators() -> frozenset[str]:
    """Return the operators whose CUDA wrapper does not check devices: their kernels iterate tensors and check there."""
    return frozenset(name for name, entry in _table().items() if not entry.checks_devices)


def is_structured(name: str) -> bool:
    """Return whether an operator, by name with overload, is a structured one or delegates to one."""
    entry = _table().get(name)
    return entry is not None and (entry.structured or entry.delegate is not None)


@functools.cache
def _table() -> Mapping[str, _Entry]:
    """Read torch's table of operators. By line, because reading the whole as YAML takes seconds and a package."""
    path = Path(torch.__file__).parent.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    table: dict[str, _Entry] = {}
    entry = _Entry()
    for line in path.read_text().splitlines():
        if found := _FUNCTION.match(line):
            entry = table[found[1]] = _Entry()
        elif line.startswith("  structured_delegate: "):
            entry.delegate = line.split(": ", 1)[1].split("#")[0].strip()
        elif line.startswith("  structured: True"):
            entry.structured = True
        elif line.startswith("  device_check: NoCheck"):
            entry.checks_devices = False
        elif found := _DISPATCH.match(line):
            entry.keys.update(key.strip() for key in found[1].split(","))
    return table
