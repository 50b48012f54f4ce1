"""What kernels of MPS refuse and the CPU's do not: the dtypes of ``mps_dtypes.json``.

``kernels/pipeline.py`` asks :func:`of` for the check of an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdevice.foundation import data_files
from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of

GAPS: Mapping[str, list[str]] = data_files.read(__file__, "mps_dtypes.json")
"""Operator -> the dtypes in which the CPU has a kernel and MPS none. ``docs/make_mps_dtypes.py`` makes the table."""

_COMPLEX = {torch.complex32: "ComplexHalf", torch.complex64: "ComplexFloat"}


def of(op: Any) -> list[Callable[[Any, Any], None]]:
    """Return the check of the arguments of an operator's calls; none where MPS accepts every dtype."""
    name = op._schema.name.removeprefix("aten::").rstrip("_")
    dtypes = frozenset(getattr(torch, dtype) for dtype in GAPS.get(name, ()))

    def refuse(args: Any, kwargs: Any) -> None:
        if policy.stands_for_mps():
            for value in args:
                if isinstance(value, torch.Tensor) and dtype_of(value) in dtypes:
                    raise TypeError(_message(name, dtype_of(value)))

    return [refuse] if dtypes else []


def _message(name: str, dtype: torch.dtype) -> str:
    """Return a text of MPS's: of its conversion of dtypes, or of its operations. Some kernels have another text."""
    if dtype in _COMPLEX:
        kind = _COMPLEX[dtype]
        return f"Trying to convert {kind} to the MPS backend but it does not have support for that dtype."
    return f"Operation '{name}()' does not support input type '{str(dtype).removeprefix('torch.')}' in MPS backend."
