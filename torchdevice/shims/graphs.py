"""CUDA graphs and memory pools, which are classes on C types, and the names of ``torch._C`` imported by value there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from torchdevice import _active
from torchdevice._journal import Fidelity
from torchdevice._patching import Patch, Replaced, replaced_function
from torchdevice.bindings import graphs, streams
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _refusing_new(name: str, remedy: str) -> Any:
    """Return the maker of a ``__new__`` that refuses in a scope."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            if _active.state.scope is not None:
                raise NotSupportedError(name, remedy)
            return original(cls, *args, **kwargs)

        return __new__

    return make


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
    no_graph = _refusing_new("torch.cuda.CUDAGraph", "Call the function instead of capturing and replaying it.")
    no_pool = _refusing_new("torch.cuda.MemPool", "Leave it out; tensors are allocated as usual.")
    return [
        Replaced(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", _by_scope(_is_capturing)),
        Replaced(torch.cuda.graphs, "_graph_pool_handle", _by_scope(_pool_handle)),
        Replaced(torch.cuda.CUDAGraph, "__new__", no_graph),
        Replaced(torch.cuda.MemPool, "__new__", no_pool),
        replaced_function(torch.cuda.graphs, "make_graphed_callables", _make_graphed_callables),
        replaced_function(torch.cuda, "make_graphed_callables", _make_graphed_callables),
    ]


def _by_scope(replacement: Any) -> Any:
    """Return the maker of a function that takes the place of a class in a build without CUDA."""

    def make(original: Any) -> Any:
        def function(*args: Any) -> Any:
            scope = _active.state.scope
            return original(*args) if scope is None else replacement(scope, original, *args)

        return function

    return make
