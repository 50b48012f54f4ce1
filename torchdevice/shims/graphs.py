"""CUDA graphs and memory pools, which are classes on C types, and the names of ``torch._C`` imported by value there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchdevice._journal import Fidelity
from torchdevice._patching import Patch, replaced_function
from torchdevice.bindings import graphs, streams
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _refusal(name: str, remedy: str) -> Any:
    """Return a replacement that refuses."""

    def refuse(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupportedError(name, remedy)

    return refuse


def _make_graphed_callables(
    scope: Scope, original: Any, callables: Any, sample_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """The callables as they are: each call runs their operators, which is what a replay would do."""
    scope.report("torch.cuda.make_graphed_callables", "the callables themselves", Fidelity.APPROXIMATE)
    return callables


def _is_capturing(scope: Scope, original: Any) -> bool:
    return streams.is_current_stream_capturing(scope)


def _pool_handle(scope: Scope, original: Any) -> Any:
    return graphs.graph_pool_handle(scope)


def patches() -> list[Patch]:
    """Return the patches of graphs and pools."""
    no_graph = _refusal("torch.cuda.CUDAGraph", "Call the function instead of capturing and replaying it.")
    no_pool = _refusal("torch.cuda.MemPool", "Leave it out; tensors are allocated as usual.")
    return [
        replaced_function(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", _is_capturing),
        replaced_function(torch.cuda.graphs, "_graph_pool_handle", _pool_handle),
        replaced_function(torch.cuda.CUDAGraph, "__new__", no_graph),
        replaced_function(torch.cuda.MemPool, "__new__", no_pool),
        replaced_function(torch.cuda.graphs, "make_graphed_callables", _make_graphed_callables),
        replaced_function(torch.cuda, "make_graphed_callables", _make_graphed_callables),
    ]
