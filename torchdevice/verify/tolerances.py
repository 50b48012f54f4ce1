"""Whether two results agree, within what torch.testing allows for their dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.testing import _comparison

from torchdevice.verify.operator_facts import Operator

_default_tolerances = functools.cache(_comparison.default_tolerances)

ROUNDINGS = 16
"""How many times the effect of one rounding of the inputs is allowed, where more than
torch.testing's default is.
"""


class Difference(NamedTuple):
    """How a result differs from the reference.

    Attributes:
        kind: One of the kinds of a finding.
        what: What differs, to be put after the name of the result.
        error: The largest absolute error; None where that has no meaning.
        allowed: The error that is allowed there.
    """

    kind: str
    what: str
    error: float | None = None
    allowed: float | None = None


def of_properties(actual: torch.Tensor, expected: torch.Tensor, *, wide: bool) -> Difference | None:
    """Return how shape or dtype differ; a reference in float64 has the right kind of dtype only."""
    if actual.shape != expected.shape:
        return Difference(
            "shape", f"has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        )
    one, other = actual.dtype, expected.dtype
    are_floats = one.is_floating_point and other.is_floating_point
    are_complex = one.is_complex and other.is_complex
    if one == other or (wide and (are_floats or are_complex)):
        return None
    found, wanted = (str(each).removeprefix("torch.") for each in (one, other))
    return Difference("dtype", f"has dtype {found} instead of {wanted}")


def of_values(
    actual: torch.Tensor, expected: torch.Tensor, more: torch.Tensor | None = None
) -> Difference | None:
    """Return how the values of two CPU tensors of one shape differ; None where they agree.

    Args:
        actual: The result.
        expected: The reference, in the dtype of the result or in a more precise one.
        more: The error of each element that is allowed in addition to torch.testing's default; None
            for none.
    """
    # Rounded to the result's dtype, since no kernel can be closer than that.
    rounded = expected if expected.dtype == actual.dtype else expected.to(actual.dtype)
    relative, absolute = _default_tolerances(actual.dtype)
    if actual.dtype == torch.complex32:  # in which the CPU compares nothing
        actual, rounded = actual.to(torch.complex64), rounded.to(torch.complex64)
    # The usual cases end here, without float64.
    if surely_agree(actual, rounded, relative, absolute):
        return None
    one, other = _in_double(actual), _in_double(rounded)
    error = (one - other).abs()
    allowed = absolute + relative * other.abs()
    if more is not None:
        allowed = allowed + more
    # Whole numbers are compared as such: float64 has not all of them.
    are_equal = actual == rounded
    are_nan = one.isnan() & other.isnan()
    # A float64 error of 0 with unequal values means whole numbers that float64 rounds.
    are_near = (error <= allowed) & (error > 0)
    agree = are_equal | are_nan | are_near
    if bool(agree.all()):
        return None
    return _described(one, other, error, allowed, ~agree)


_FEW = 4096
"""From so many elements on ``torch.equal``, which uses no vector instructions, takes longer than
three other calls.
"""


def surely_agree(
    actual: torch.Tensor, rounded: torch.Tensor, relative: float = 0, absolute: float = 0
) -> bool:
    """Return whether all elements are within half the tolerance; the comparison rounds too."""
    has_vectors = actual.dtype in (torch.float32, torch.float64)
    if actual.numel() < _FEW or not has_vectors:
        agree = actual.dtype != torch.complex32 and torch.equal(actual, rounded)
        if agree or not has_vectors or not (relative or absolute):
            return agree
    error = actual - rounded
    low, high = error.aminmax()
    largest = max(-low.item(), high.item())
    if largest <= absolute / 2:  # not where a number is infinite or NaN
        return True
    beyond = error.abs_().sub_(rounded.abs(), alpha=relative / 2)
    return bool(beyond.amax() <= absolute / 2)


def _in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _described(
    actual: torch.Tensor,
    expected: torch.Tensor,
    error: torch.Tensor,
    allowed: torch.Tensor,
    wrong: torch.Tensor,
) -> Difference:
    """Return the difference, with the element whose error exceeds the most."""
    # NaN compares with nothing, so it counts as the largest excess.
    excess = torch.where(wrong, torch.nan_to_num(error - allowed, nan=torch.inf), -torch.inf)
    at = int(excess.reshape(-1).argmax()) if excess.numel() else 0
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(at), excess.shape))
    kind = "values"
    if bool((actual.isnan() & ~expected.isnan()).any()):
        kind = "NaN"
    elif bool((actual.isinf() & ~expected.isinf()).any()):
        kind = "inf"
    of = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
    where = f" at {list(index)}" if index else ""
    values = f"{actual[index].item()!r} instead of {expected[index].item()!r}"
    largest, most = float(error[index]), float(allowed[index])
    return Difference(kind, f"{of}, most{where}: {values}", largest, most)


def named(difference: Difference, name: str) -> str:
    """Return the sentence of a finding."""
    if difference.kind in ("shape", "dtype"):
        return f"{name} {difference.what}"
    return f"{name}: {difference.what}"


def sensitivity(results: list[Any], reference: Any, terms: float | None) -> torch.Tensor:
    """Return how far each element may be off by the roundings in a kernel.

    Args:
        results: The reference for inputs that were moved by up to one rounding each.
        reference: The reference for the inputs themselves.
        terms: From how many products or numbers an element is added up; a kernel that adds one
            after the other makes as many roundings. None for an operator whose elements depend on
            one element of each input. An element of others may be off as far as half of the
            elements are: one that the moves happen not to change is computed from as many numbers.
    """
    exact = _in_double(reference)
    errors = [(_in_double(each) - exact).abs() for each in results]
    finite = torch.nan_to_num(torch.stack(errors), nan=0.0, posinf=0.0)
    most = finite.amax(0)
    if terms is None:
        return ROUNDINGS * most
    if most.numel():
        # By the median: an element that the moves happen to leave is as uncertain as the others.
        most = most.clamp(min=float(most.median()))
    # Roundings of independent terms add up like the square root of their number.
    return ROUNDINGS * math.sqrt(terms) * most


def terms_of(inputs: list[torch.Tensor], result: torch.Tensor) -> float:
    """Return roughly how many numbers are added up per result element, by element counts.

    A product of m x k and k x n has k terms, the sum of n elements n.
    """
    number = max(1, result.numel())
    numbers = (
        each.numel() for each in inputs if each.dtype.is_floating_point or each.dtype.is_complex
    )
    *_, other, largest = [1, 1, *sorted(numbers)]
    return max(1.0, largest / number, math.sqrt(largest * other / number))


# ---- random numbers that the CPU cannot draw as the target does ----------------------------------

_Given = dict[str, Any]

_RANGES: dict[str, Callable[[_Given], tuple[float, float]]] = {
    "bernoulli": lambda given: (0, 1),
    "exponential": lambda given: (0, math.inf),
    "multinomial": lambda given: (0, given["self"].shape[-1] - 1),
    "rand": lambda given: (0, 1),
    "randint": lambda given: (given.get("low", 0), given["high"] - 1),
    "randperm": lambda given: (0, given["n"] - 1),
    "uniform": lambda given: (given.get("from", 0), given.get("to", 1)),
}
"""Operator -> the least and the greatest number that it may draw, of its arguments."""


def outside(
    operator: Operator, given: _Given, actual: torch.Tensor, expected: torch.Tensor
) -> Difference | None:
    """Return how random numbers leave their range, or lose finite values; None if neither.

    Args:
        operator: The operator that drew them.
        given: Its arguments by name.
        actual: The numbers, on the CPU.
        expected: Numbers that the CPU drew.
    """
    if not actual.numel():
        return None
    low, high = _limits(actual)
    is_finite = math.isfinite(low) and math.isfinite(high)
    if not is_finite and all(map(math.isfinite, _limits(expected))):
        return Difference("NaN" if math.isnan(low) else "inf", "is not finite where the CPU's is")
    name = operator.op._schema.name.partition("::")[2].rstrip("_").removesuffix("_like")
    if name not in _RANGES:
        return None
    least, greatest = _RANGES[name](given)
    if low >= least and high <= greatest:
        return None
    return Difference(
        "range", f"has numbers from {low!r} to {high!r}, outside of {least!r} to {greatest!r}"
    )


def _limits(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the least and the greatest number; NaN for both where there is one."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = numbers.double().aminmax()
    return low.item(), high.item()
