"""What kernels of MPS refuse and the CPU's do not: the dtypes of ``mps_dtypes.json``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchdevice.foundation import data_files
from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of
from torchdevice.simulation.refusals.rules import Rule, name_of

GAPS: Mapping[str, list[str]] = data_files.read(__file__, "mps_dtypes.json")
"""Operator -> the dtypes in which the CPU has a kernel and MPS none. ``docs/make_mps_dtypes.py`` makes the table."""

_COMPLEX = {torch.complex32: "ComplexHalf", torch.complex64: "ComplexFloat"}


def rules_of(op: Any) -> Iterator[Rule]:
    """Yield the rules of an operator: those of the table, and the dtypes that its kernel lacks."""
    name = name_of(op)
    dtypes = frozenset(getattr(torch, dtype) for dtype in GAPS.get(name, ()))
    if dtypes:
        refuses = functools.partial(_lacked, name, dtypes)
        yield Rule(name, refuses, "torch's lists for its MPS tests", TypeError, policy.stands_for_mps)


def _lacked(name: str, dtypes: frozenset[torch.dtype], *args: Any, **kwargs: Any) -> str | None:
    found = (dtype_of(each) for each in args if isinstance(each, torch.Tensor))
    return next((_message(name, dtype) for dtype in found if dtype in dtypes), None)


def _message(name: str, dtype: torch.dtype) -> str:
    """Return a text of MPS's: of its conversion of dtypes, or of its operations. Some kernels have another text."""
    if dtype in _COMPLEX:
        kind = _COMPLEX[dtype]
        return f"Trying to convert {kind} to the MPS backend but it does not have support for that dtype."
    return f"Operation '{name}()' does not support input type '{str(dtype).removeprefix('torch.')}' in MPS backend."
