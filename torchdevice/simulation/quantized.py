"""Refuses quantized tensors: torch has no allocator for them on the device, and DLPack does not know their dtypes.

Quantization that stays in plain dtypes, such as ``torch.fake_quantize_per_tensor_affine``, is not refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torchdevice.errors import NotSupportedError

MAKING = (
    "quantize_per_tensor",
    "quantize_per_tensor.tensor_qparams",
    "quantize_per_tensor.tensors",
    "quantize_per_tensor_dynamic",
    "quantize_per_channel",
    "_make_per_tensor_quantized_tensor",
    "_make_per_channel_quantized_tensor",
    "_empty_affine_quantized",
    "_empty_per_channel_affine_quantized",
    "empty_quantized",
)
"""The operators that make quantized tensors."""


def register(aten: torch.library.Library) -> None:
    """Register the refusals with torch."""
    for key in ("PrivateUse1", "QuantizedPrivateUse1"):
        for name in MAKING:
            aten.impl(name, _refuse, key)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotSupportedError("a quantized tensor", "Quantize on the CPU, or use fake quantization.")
