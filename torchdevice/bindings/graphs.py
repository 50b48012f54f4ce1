"""CUDA graphs. For ``torch/cuda/graphs.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdevice._journal import Fidelity
from torchdevice.bindings import supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope


@supplies("_host_emptyCache", Fidelity.INERT, note="no page-locked host memory is cached")
def host_empty_cache(scope: Scope) -> None:
    """Nothing to give back."""


@supplies("_graph_pool_handle")
def graph_pool_handle(scope: Scope) -> tuple[int, int]:
    """A fresh identifier of a memory pool, which nothing allocates from."""
    scope.settings["graph_pools"] = scope.settings.get("graph_pools", 0) + 1
    return 0, scope.settings["graph_pools"]
