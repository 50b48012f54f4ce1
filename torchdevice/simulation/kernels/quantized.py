"""Quantized tensors, which a simulated device does not have: each way to one is refused.

Torch makes them for devices whose allocator is in C++ only, DLPack does not know them, and torch announces that it will
drop them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torchdevice.errors import NotSupportedError
from torchdevice.foundation import data_files

MAKING = data_files.read(__file__, "operators.json")["making quantized tensors"].split()
"""The operators that make quantized tensors."""


def register(aten: torch.library.Library) -> torch.library.Library:
    """Register the refusals with torch. Return the library of the fallback."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_refuse, "QuantizedPrivateUse1")
    for name in MAKING:
        base, _, overload = name.partition(".")
        if hasattr(getattr(torch.ops.aten, base, None), overload or "default"):
            aten.impl(name, _refuse, "PrivateUse1")
    return fallback


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    remedy = "Quantize on the CPU, or use fake quantization or a library with tensor subclasses."
    raise NotSupportedError("A quantized tensor", remedy)
