"""The names of dtypes in C++, which torch's errors show."""

from __future__ import annotations

import functools

import torch


@functools.cache
def scalar_type(dtype: torch.dtype) -> str:
    """Return a dtype in the spelling of torch's errors and legacy types (c10/core/ScalarType.h)."""
    legacy = torch.empty(0, dtype=dtype, device="cpu").type()  # such as "torch.BFloat16Tensor"
    return legacy.removeprefix("torch.").removesuffix("Tensor")
