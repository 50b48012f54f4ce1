"""Variables of MPS's allocator, read at first use as in aten/src/ATen/mps/MPSAllocator.mm."""

from __future__ import annotations

import os

_HIGH, _LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"

_HIGHEST = 2.0

_DEFAULTS = {_HIGH: 1.7, _LOW: 1.4}
"""Variable -> its default on a Mac with unified memory."""


def high_ratio() -> float | None:
    """Return the share of memory for the program, if a variable sets it; 0 lifts the limit.

    Raises:
        RuntimeError: A ratio is out of range. The low one may not be above the high one, also where
            only the high one is set.
    """
    ratios = {
        name: _number(os.environ[name]) if name in os.environ else ratio
        for name, ratio in _DEFAULTS.items()
    }
    high, low = ratios[_HIGH], ratios[_LOW]
    if not 0 <= high <= _HIGHEST:
        raise RuntimeError(f"invalid high watermark ratio {high:g}")
    if not 0 <= low <= (high or _HIGHEST):
        raise RuntimeError(f"invalid low watermark ratio {low:g}")
    return high if _HIGH in os.environ else None


def _number(text: str) -> float:
    """Return the number at the beginning of a text, like C's ``strtod`` for ordinary texts."""
    try:
        return float(text)
    except ValueError:
        return 0.0
