"""Operators of ATen by name with overload, and those that need a kernel of their own beside a fallback."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torchdevice.fallback.fallback_kernels import COMPOSITE, overload
from torchdevice.foundation.torch_internals import registrations_for_dispatch_key


def overload_of(name: str) -> Any:
    """Return an operator of ATen."""
    return overload(f"aten::{name}")


@functools.cache
def composite() -> frozenset[str]:
    """Return the operators with a composite kernel, which torch runs before a fallback, by name with namespace."""
    return frozenset(name for key in COMPOSITE for name in registrations_for_dispatch_key(key))


def shadowed(key: str) -> set[str]:
    """Return the operators of ATen with a composite kernel and one for a dispatch key."""
    return of_aten(composite().intersection(registrations_for_dispatch_key(key)))


def of_aten(names: Iterable[str]) -> set[str]:
    """Return the operators of ATen among those with a namespace, without it."""
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
