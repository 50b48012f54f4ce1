"""Functions that take the place of torch's in a scope. Each is registered by a decorator, where it is defined."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from torchdevice.core.importing import Late
from torchdevice.core.patching import Patch, Replaced, ReplacedInImporters, routed

F = TypeVar("F", bound=Callable[..., Any])

REPLACED: list[Patch] = []
"""The patches of what is there when this package is imported."""

LATER: dict[str, Any] = {}
"""Full name of a module -> its patches, put in once a program has imported it."""


def replaces(
    owner: Any,
    *names: str,
    native_to: str | None = None,
    makes: bool = False,
    by_value: bool = False,
    optional: bool = False,
    sees_scope: bool = False,
) -> Callable[[F], F]:
    """Register a function ``(context, original, ...)`` that is called in a scope in place of functions of torch.

    Args:
        owner: The module or class with the functions or other attributes. One that programs import themselves is given
            as a text: ``"package.module"``, or ``"package.module:Class"``. None for one that this torch lacks.
        names: Their names.
        native_to: See :func:`per_context`.
        makes: Whether the function is called with what is there, and returns what takes its place.
        by_value: Whether modules of torch import the functions by value, so that these modules get them too.
        optional: Whether some releases or builds of torch lack the functions.
        sees_scope: See :class:`Late`. The module of a text only.
    """
    kind = ReplacedInImporters if by_value else Replaced

    def register(function: F) -> F:
        def patches(within: Any) -> list[Patch]:
            make = function if makes else routed(within, function, native_to)
            return [kind(within, name, make) for name in names if not optional or hasattr(within, name)]

        if owner is None:
            return function
        if isinstance(owner, str):
            module, _, inner = owner.partition(":")
            of_inner = operator.attrgetter(inner) if inner else lambda module: module
            later(module, sees_scope=sees_scope)(lambda module: patches(of_inner(module)))
        else:
            REPLACED.extend(patches(owner))
        return function

    return register


def later(module: str, *, sees_scope: bool = False) -> Callable[[Callable[[ModuleType], list[Patch]]], Any]:
    """Register a function that returns patches of a module which programs import themselves."""
    return LATER.setdefault(module, Late(module, sees_scope=sees_scope)).makers.append
