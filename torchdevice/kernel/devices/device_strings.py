"""Which accelerator a device argument spells. Pure functions without state.

A spelling is a whole device argument: ``"cuda"``, ``"cuda:1"``, ``torch.device("mps")``, an int
where torch takes one. Any other argument, also a malformed one such as ``"cuda:x"``, is passed to
torch, which raises its own error.
"""

from __future__ import annotations

import numbers
import operator
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from torchdevice.kernel.devices.accelerators import FAMILIES, SPELLED

FORCE_CPU = "cpu:-1"
"""The spelling that sends the rest of the active scope to the CPU. torch itself refuses a negative
index.
"""

FORCING_CPU = ((FORCE_CPU,), (FORCE_CPU.partition(":")[0], -1))
"""The arguments of ``torch.device`` that send the rest of the active scope to the CPU."""


@dataclass(frozen=True)
class Spelling:
    """An accelerator as the program wrote it.

    Attributes:
        accelerator: ``"cuda"``, ``"mps"`` or ``"xpu"``.
        index: The ordinal, None where the program wrote none.
    """

    accelerator: str
    index: int | None

    def __str__(self) -> str:
        return self.accelerator if self.index is None else f"{self.accelerator}:{self.index}"


def parse(value: object) -> Spelling | None:
    """Return the accelerator that ``value`` spells, or None if it spells no accelerator.

    An int, or an integer of NumPy, is the ordinal of the program's accelerator and is returned as
    ``"cuda"``. A bool is not an ordinal.
    """
    if isinstance(value, str):
        match = SPELLED.fullmatch(value)
        if match is None:
            return None
        return Spelling(match[1], None if match[2] is None else int(match[2]))
    if isinstance(value, torch.device):
        return Spelling(value.type, value.index) if value.type in FAMILIES else None
    ordinal = ordinal_of(value)
    return Spelling("cuda", ordinal) if ordinal is not None and ordinal >= 0 else None


def ordinal_of(value: object) -> int | None:
    """Return an int, or an integer of NumPy, as an int; None for a bool and for any other value."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return operator.index(value)
    return None


LEGACY_DTYPES: dict[str, torch.dtype] = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}
"""The dtypes of legacy tensor types such as ``torch.cuda.FloatTensor``, by the type's name."""

_SPELLED_AS_LEGACY = frozenset(("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"))
"""The scalar types that torch's errors spell as legacy types; others have the dispatch key."""

_LEGACY_TYPE = re.compile(rf"torch\.({'|'.join(FAMILIES)})\.(?:sparse\.)?(\w+)")


def tensor_type(scalar: str, device_type: str) -> str:
    """Return a tensor's type in torch's errors: ``torch.cuda.FloatTensor``, ``CUDABoolType``."""
    if scalar not in _SPELLED_AS_LEGACY:
        return f"{device_type.upper()}{scalar}Type"
    return (
        f"torch.{scalar}Tensor" if device_type == "cpu" else f"torch.{device_type}.{scalar}Tensor"
    )


def legacy_dtype(wanted: Any, families: Collection[str] = FAMILIES) -> torch.dtype | None:
    """Return the dtype of a legacy tensor type, given as a class or by dotted name; else None."""
    if not isinstance(wanted, str):
        wanted = f"{getattr(wanted, '__module__', '')}.{getattr(wanted, '__name__', '')}"
    match = _LEGACY_TYPE.fullmatch(wanted)
    return LEGACY_DTYPES.get(match[2]) if match and match[1] in families else None
