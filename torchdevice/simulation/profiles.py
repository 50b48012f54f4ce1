"""Operators and dtypes that each simulated device lacks, as data from named sources.

- ``cuda``: no dtype. CUDA has a kernel for most operators for which the CPU has one; what it refuses of the others is
  in ``cuda_refusals.py``.
- ``mps``: float8, float64 and complex128 (torch/testing/_internal/common_mps.py and the texts torch raises), and the
  operators that torch's own table gives neither an MPS kernel nor a composite one (``missing_operators.py``).
- ``strict``: everything that ``cuda`` or ``mps`` lacks, without a fallback to the CPU. A program that runs on it needs
  nothing that either of the two lacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchdevice.devices import device_models
from torchdevice.foundation.torch_texts import text
from torchdevice.simulation.missing_operators import missing_operators


@dataclass(frozen=True)
class Profile:
    """A kind of device to simulate.

    Attributes:
        name: The profile's name in a target, as in ``simulated:mps``.
        backends: Dispatch keys of torch's backends. The device lacks every operator that one of these backends lacks.
        accelerator: The device type that programs spell for the device.
        unsupported_dtypes: Dtypes that the device cannot hold.
        single: Whether a machine never has more than one such device.
        refuses: Whether an operator that the device lacks always raises, without a fallback to the CPU.
        stands_for_cuda: Whether the device refuses what CUDA refuses.
        operators: Further operators that the device lacks, with or without an overload.
    """

    name: str
    backends: tuple[str, ...] = ()
    accelerator: str = "cuda"
    unsupported_dtypes: frozenset[torch.dtype] = field(default_factory=frozenset)
    single: bool = False
    refuses: bool = False
    stands_for_cuda: bool = False
    operators: frozenset[str] = frozenset()

    @property
    def lacks_anything(self) -> bool:
        """Whether there is a dtype or an operator that the device lacks."""
        return bool(self.backends or self.unsupported_dtypes or self.operators)

    def missing(self, op: Any) -> str | None:
        """Return an operator's name, as the device's error spells it, if the device lacks the operator, else None."""
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
        """Return the text of torch's error for a dtype that Metal lacks (aten/src/ATen/mps/EmptyTensor.cpp)."""
        name = str(dtype).removeprefix("torch.")
        if dtype in FLOAT8 or dtype is torch.complex128:
            kind = "ComplexDouble" if dtype.is_complex else name.capitalize()
            return f"Trying to convert {kind} to the MPS backend but it does not have support for that dtype."
        other = "float32" if dtype.is_floating_point else "complex64"
        return text("dtype missing on MPS", name=name, other=other)


FLOAT8 = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))


_NOT_ON_METAL = frozenset({torch.float64, torch.complex128}) | FLOAT8


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("cuda", stands_for_cuda=True),
        Profile("mps", backends=("MPS",), accelerator="mps", unsupported_dtypes=_NOT_ON_METAL, single=True),
        Profile("strict", backends=("MPS",), unsupported_dtypes=_NOT_ON_METAL, refuses=True, stands_for_cuda=True),
    )
}


def missing_on_cuda(operator: str, backend: str = "CUDA") -> str:
    """Return torch's text for an operator that CUDA lacks (aten/src/ATen/core/dispatch/OperatorEntry.cpp)."""
    cpu = backend.replace("CUDA", "CPU").replace("MPS", "CPU")
    return text("missing on CUDA", operator=operator, backend=backend, cpu=cpu)


def find(name: str) -> Profile | None:
    """Return the profile of a name, or the one that a model of a device is made from.

    Raises:
        ValueError: The model is not a valid one.
    """
    if name in PROFILES:
        return PROFILES[name]
    model = device_models.find(name)
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
        operators=frozenset(operator.removeprefix("aten::") for operator in model.missing_operators),
    )


def _dtype(name: str, model: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"{model}: unsupported_dtypes has {name!r}, which is not a dtype. Use names such as 'float64'."
        )
    return found
