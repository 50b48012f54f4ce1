"""Dtypes that kernels of MPS refuse and the CPU's accept, from ``mps_dtypes.py``.

:func:`guarded` wraps the kernels of these operators. The other kernels stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of
from torchdevice.simulation.refusals.mps_dtypes import GAPS

Kernel = Callable[..., Any]

_COMPLEX = {torch.complex32: "ComplexHalf", torch.complex64: "ComplexFloat"}


def guarded(op: Any, kernel: Kernel) -> Kernel:
    """Return a kernel that refuses the dtypes that MPS's refuses; the kernel itself where those are none."""
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    dtypes = frozenset(getattr(torch, dtype) for dtype in GAPS.get(name, ()))
    if not dtypes:
        return kernel

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if policy.stands_for_mps():
            for value in args:
                if isinstance(value, torch.Tensor) and dtype_of(value) in dtypes:
                    raise TypeError(_message(name, dtype_of(value)))
        return kernel(*args, **kwargs)

    return refusing


def _message(name: str, dtype: torch.dtype) -> str:
    """Return a text of MPS's: of its conversion of dtypes, or of its operations. Some kernels have another text."""
    if dtype in _COMPLEX:
        kind = _COMPLEX[dtype]
        return f"Trying to convert {kind} to the MPS backend but it does not have support for that dtype."
    return f"Operation '{name}()' does not support input type '{str(dtype).removeprefix('torch.')}' in MPS backend."
