"""What MPS refuses of an operator: its rules, and the dtypes of ``mps_dtypes.json``.

The rules name files below ``aten/src/ATen/native`` of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchdevice.foundation import data_files
from torchdevice.foundation.torch_texts import text
from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of
from torchdevice.simulation.refusals.refusal_rules import Rule, by_operator, name_of, scalar_type

GAPS: Mapping[str, list[str]] = data_files.read(__file__, "mps_dtypes.json")
"""Operator -> the dtypes in which the CPU has a kernel and MPS none. ``docs/make_mps_dtypes.py`` makes the table."""


def _projected(input: torch.Tensor, *args: Any) -> Any:
    states = next(each for each in args if isinstance(each, list))
    return states[0].size(2) != states[1].size(2) and "LSTM with projections is not currently supported with MPS."


def _convolution(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **out: Any) -> Any:
    if dtype_of(input) is torch.int64:  # the CPU has no kernel for other integers
        return "Convolution is supported only for Floating types"
    halves = rest[4] and input.dim() == 5 and dtype_of(input) in (torch.float16, torch.bfloat16)
    return halves and "ConvTranspose 3D with BF16 or FP16 types is not supported on MPS"


def _channels(input: torch.Tensor, weight: torch.Tensor, *rest: Any, **out: Any) -> Any:
    return weight.size(0) > 1 << 16 and "Output channels > 65536 not supported at the MPS device."


def _pooled(self: torch.Tensor, output_size: list[int], *args: Any, **out: Any) -> Any:
    odd = any(size % wanted for size, wanted in zip(self.shape[-2:], output_size, strict=False) if wanted)
    return odd and text("pooled on MPS")


RULES = by_operator(
    Rule("lstm", _projected, "mps/operations/RnnOps.mm: _lstm_mps"),
    Rule("convolution", _convolution, "mps/operations/Convolution.mm: _mps_convolution_impl and _transpose"),
    Rule("convolution", _channels, "mps/operations/Convolution.mm: _mps_convolution_impl", NotImplementedError),
    Rule("_adaptive_avg_pool2d", _pooled, "mps/operations/AdaptivePooling.mm"),
    holds=policy.stands_for_mps,
)


def rules_of(op: Any) -> Iterator[Rule]:
    """Yield the rules of an operator: those of the table, and the dtypes that its kernel lacks."""
    name = name_of(op)
    yield from RULES.get(name, ())
    dtypes = frozenset(getattr(torch, dtype) for dtype in GAPS.get(name, ()))
    if dtypes:
        refuses = functools.partial(_lacked, name, dtypes)
        yield Rule(name, refuses, "torch's lists for its MPS tests", TypeError, policy.stands_for_mps)


def _lacked(name: str, dtypes: frozenset[torch.dtype], *args: Any, **kwargs: Any) -> str | None:
    found = (dtype_of(each) for each in args if isinstance(each, torch.Tensor))
    return next((_message(name, dtype) for dtype in found if dtype in dtypes), None)


def _message(name: str, dtype: torch.dtype) -> str:
    """Return a text of MPS's: of its conversion of dtypes, or of its operations. Some kernels have another text."""
    if dtype.is_complex:
        return f"Trying to convert {scalar_type(dtype)} to the MPS backend but it does not have support for that dtype."
    return f"Operation '{name}()' does not support input type '{str(dtype).removeprefix('torch.')}' in MPS backend."
