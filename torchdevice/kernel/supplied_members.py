"""Members of torch's modules that a context supplies, and the program's changes to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class SuppliedMembers:
    """Values of the names that a context supplies.

    Args:
        context: The first argument of supplied functions.

    Attributes:
        values: Values that do not change in the context, kept when they are first read.
        written: Values that the program has set over supplied ones.
    """

    def __init__(self, context: object) -> None:
        self.values: dict[Any, Any] = {}
        self.written: dict[Any, Any] = {}
        self._context = context
        self._bound: dict[Any, Any] = {}

    def bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function bound to the context: the same object each time."""
        found = self._bound.get(function)
        # Kept, because torch and programs compare functions by identity.
        if found is None:
            partial = functools.partial(function, self._context)
            found = self._bound[function] = functools.wraps(function)(partial)
        return found
