"""CUDA's ``libdevice``, by the functions of torch and NumPy that compute the same."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchdevice.kernel.thread_state import refuse


def by_torch(function: Callable[..., torch.Tensor], *args: Any) -> Any:
    """Apply a function of torch to arrays."""
    taken = np.broadcast_arrays(*args)
    return function(*(torch.from_numpy(np.ascontiguousarray(each)) for each in taken)).numpy()


_OTHERS = {
    "cyl_bessel_i0": "i0",
    "cyl_bessel_i1": "i1",
    "fdivide": "divide",
    "llabs": "abs",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "rcp": "reciprocal",
    "finite": "isfinite",
    "llrint": "rint",
    "llround": "round",
    "nearbyint": "rint",
    "j0": "bessel_j0",
    "j1": "bessel_j1",
    "y0": "bessel_y0",
    "y1": "bessel_y1",
    "normcdf": "ndtr",
    "normcdfinv": "ndtri",
}
"""The names of ``libdevice``, and those of NumPy or torch where they differ."""

_BY_NAME: dict[str, Callable[..., Any]] = {
    "exp10": lambda x: np.power(10, x, dtype=x.dtype),
    "fma": lambda x, y, z: x.astype(np.float64) * y + z,
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "saturate": lambda x: np.clip(x, 0, 1),
    "fdim": lambda x, y: np.maximum(x - y, 0),
    "sinpi": lambda x: np.sin(np.pi * x.astype(np.float64)),
    "cospi": lambda x: np.cos(np.pi * x.astype(np.float64)),
}
"""The functions that NumPy and torch lack."""


@functools.cache
def function(symbol: str) -> Callable[..., Any]:
    """Return the function for a symbol such as ``__nv_tanhf``.

    Raises:
        NotSupportedError: There is none.
    """
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    name = re.sub("^[df](add|sub|mul|div|sqrt|rcp)_rn$", r"\1", name)
    # float32, float64, rounded to nearest
    for spelled in (name, name.removesuffix("f"), name.removesuffix("d"), name.removesuffix("_rn")):
        each = _OTHERS.get(spelled, spelled)
        if each in _BY_NAME:
            return _BY_NAME[each]
        for module in (torch.special, np, torch):  # the more exact ones first
            found: Any = vars(module).get(each)
            if found is not None:
                return found if isinstance(found, np.ufunc) else functools.partial(by_torch, found)
    refuse(
        f"tl.extra.libdevice: {symbol}",
        "Write the function with tl.math, or run the kernel on a GPU.",
    )
