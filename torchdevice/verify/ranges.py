"""The range of random numbers, where the CPU cannot draw the same ones as the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.verify.operator_facts import Operator
from torchdevice.verify.tolerances import Difference

_Given = dict[str, Any]

_RANGES: dict[str, Callable[[_Given], tuple[float, float]]] = {
    "bernoulli": lambda given: (0, 1),
    "exponential": lambda given: (0, math.inf),
    "multinomial": lambda given: (0, given["self"].shape[-1] - 1),
    "rand": lambda given: (0, 1),
    "rand_like": lambda given: (0, 1),
    "randint": lambda given: (given.get("low", 0), given["high"] - 1),
    "randint_like": lambda given: (given.get("low", 0), given["high"] - 1),
    "randperm": lambda given: (0, given["n"] - 1),
    "uniform": lambda given: (given.get("from", 0), given.get("to", 1)),
}
"""Operator -> the least and the greatest number that it may draw, of its arguments."""


def outside(operator: Operator, given: _Given, actual: torch.Tensor, expected: torch.Tensor) -> Difference | None:
    """Return how random numbers lie outside of their range, or are not finite where the CPU's are; None if neither.

    Args:
        operator: The operator that drew them.
        given: Its arguments by name.
        actual: The numbers, on the CPU.
        expected: Numbers that the CPU drew.
    """
    if not actual.numel():
        return None
    if bool(expected.isfinite().all()) and not bool(actual.isfinite().all()):
        return Difference("NaN" if bool(actual.isnan().any()) else "inf", "is not finite where the CPU's is")
    name = operator.op._schema.name.partition("::")[2].rstrip("_")
    if name not in _RANGES:
        return None
    least, greatest = _RANGES[name](given)
    parts = (torch.view_as_real(actual) if actual.is_complex() else actual).double()
    low, high = parts.min().item(), parts.max().item()
    if low >= least and high <= greatest:
        return None
    return Difference("range", f"has numbers from {low!r} to {high!r}, outside of {least!r} to {greatest!r}")
