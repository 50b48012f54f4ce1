"""Flags of CUDA libraries that are not there: stored for the scope and read back. For ``torch/backends/cuda``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdevice._journal import Fidelity
from torchdevice.bindings import supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_DEFAULT_PLAN_CACHE_SIZE = 4096
"""``CUFFT_DEFAULT_CACHE_SIZE`` of aten/src/ATen/native/cuda/CuFFTPlanCache.h."""


@supplies("_set_linalg_preferred_backend", Fidelity.INERT, note="stored; the target has one linear algebra library")
def set_linalg_preferred_backend(scope: Scope, backend: Any) -> None:
    """Store the choice."""
    scope.settings["linalg backend"] = backend


@supplies("_get_linalg_preferred_backend")
def get_linalg_preferred_backend(scope: Scope) -> Any:
    """The choice that was stored, torch's default before."""
    return scope.settings.get("linalg backend", torch._C._LinalgBackend.Default)


@supplies("_set_blas_preferred_backend", Fidelity.INERT, note="stored; the target has one BLAS")
def set_blas_preferred_backend(scope: Scope, backend: Any) -> None:
    """Store the choice."""
    scope.settings["blas backend"] = backend


@supplies("_get_blas_preferred_backend")
def get_blas_preferred_backend(scope: Scope) -> Any:
    """The choice that was stored, torch's default before."""
    return scope.settings.get("blas backend", torch._C._BlasBackend.Default)


def plan_cache_max_size(scope: Scope, device: int) -> int:
    """Return the size that was stored for a device, cuFFT's default before."""
    return scope.settings.get(("plan cache", device), _DEFAULT_PLAN_CACHE_SIZE)


def set_plan_cache_max_size(scope: Scope, device: int, size: int) -> None:
    """Store a size."""
    scope.settings["plan cache", device] = size
