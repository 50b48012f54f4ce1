"""Sums of blocks along different axes, like most addresses: ``rows[:, None] * n + cols[None, :]``.

Such a sum is kept as its terms. They are added up where something asks for the elements, which the
loads and stores of whole rows do not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from torchdevice.triton_kernels.triton_internals import TensorHandle


def compact(values: Any) -> Any:
    """Return values once along the axes along which they were broadcast."""
    # An axis that was broadcast has a step of 0.
    places = (slice(1) if step == 0 else slice(None) for step in values.strides)
    return values[tuple(places)]


class OuterSum(TensorHandle):  # type: ignore[misc]
    """A handle whose elements are sums.

    Args:
        terms: Arrays that broadcast to the shape.
        shape: The shape, whose first axis is that of the instances.
        dtype: The dtype of the handle.
    """

    def __init__(self, terms: list[Any], shape: tuple[int, ...], dtype: Any):
        self.terms = terms
        self.shape = shape
        self.dtype = dtype

    @functools.cached_property
    def data(self) -> Any:
        """The elements."""
        total = functools.reduce(np.add, self.terms)
        return np.broadcast_to(total, self.shape)


def terms_of(handle: Any) -> list[Any]:
    """Return arrays whose sum a handle's elements are."""
    return handle.terms if isinstance(handle, OuterSum) else [compact(handle.data)]


def added(one: Any, other: Any, terms: Iterable[Any]) -> Any:
    """Return the sum of two handles, in the dtype of the first.

    Args:
        one: The first.
        other: The second.
        terms: The terms of the second, in the first one's dtype of NumPy.
    """
    by_axes: dict[Any, Any] = {}
    for each in (*terms_of(one), *terms):
        # Terms that vary along the same axes are one term.
        axes = tuple(length > 1 for length in each.shape[1:])
        known = by_axes.get(axes)
        by_axes[axes] = each if known is None else known + each
    shape = np.broadcast_shapes(_shape_of(one), _shape_of(other))
    whole = OuterSum(list(by_axes.values()), shape, one.dtype)
    if len(by_axes) > 1:
        return whole
    return TensorHandle(whole.data, one.dtype)


def _shape_of(handle: Any) -> Any:
    """Return the shape of a handle, of which a sum need not be added up."""
    return handle.shape if isinstance(handle, OuterSum) else handle.data.shape
