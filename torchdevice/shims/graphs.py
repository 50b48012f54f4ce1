"""CUDA graphs and memory pools, which are classes on C types, and the names of ``torch._C`` imported by value there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchdevice._capture import Capture, invalidated, not_permitted
from torchdevice._patching import Callback, Patch, replaced_function
from torchdevice.bindings import graphs, streams
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope


class GraphStandIn:
    """A graph of the program: operators noted once and run again, in place of ``torch.cuda.CUDAGraph``."""

    __class__ = property(lambda self: torch.cuda.CUDAGraph)  # type: ignore[assignment]

    def __init__(self, scope: Scope):
        self._scope = scope
        self._capture: Capture | None = None
        self._captured: Capture | None = None
        self._pool: Any = None

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Note operators from now on; what they write is put back by :meth:`capture_end`."""
        thread = self._scope.thread
        if thread.capture is not None:
            raise not_permitted()
        if self._captured is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        runtime = self._scope.runtime
        generator = runtime.default_generator(self._scope.device(thread.device_index).index or 0)
        self._pool = graphs.graph_pool_handle(self._scope) if pool is None else pool
        self._capture = thread.capture = Capture(None if runtime.shares_host_memory else runtime.kind, generator)
        self._capture.__enter__()

    def capture_end(self) -> None:
        """End the capture."""
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("capture_end() was called without capture_begin()")
        capture.__exit__(None, None, None)
        self._scope.thread.capture = None
        capture.put_back()
        if capture.failed:
            raise invalidated()
        self._captured = capture

    def instantiate(self) -> None:
        """Nothing to instantiate: a captured graph can be replayed."""

    def replay(self) -> None:
        """Run the noted operators again, into the same memory."""
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._captured.replay()

    def reset(self) -> None:
        """Forget what was captured."""
        self._captured = None

    def pool(self) -> Any:
        """Return the identifier of a memory pool, which nothing allocates from."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """Nothing to enable."""

    def debug_dump(self, debug_path: str) -> NoReturn:
        """There is no CUDA graph to dump."""
        raise NotSupportedError("torch.cuda.CUDAGraph.debug_dump", "There is no CUDA graph. Use torch.profiler.")

    def raw_cuda_graph(self) -> NoReturn:
        """There is none."""
        raise NotSupportedError("torch.cuda.CUDAGraph.raw_cuda_graph", "There is no cudaGraph_t. Use replay().")

    raw_cuda_graph_exec = get_graph_data = raw_cuda_graph


def _new_graph(scope: Scope, original: Any, cls: type, keep_graph: bool = False) -> GraphStandIn:
    return GraphStandIn(scope)


def _no_pool(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotSupportedError("torch.cuda.MemPool", "Leave it out; tensors are allocated as usual.")


def _is_capturing(scope: Scope, original: Any) -> bool:
    return streams.is_current_stream_capturing(scope)


def _pool_handle(scope: Scope, original: Any) -> Any:
    return graphs.graph_pool_handle(scope)


def _forget_stream() -> None:
    """``torch.cuda.graph`` keeps a stream of its first use for the process."""
    torch.cuda.graph.default_capture_stream = None


def patches() -> list[Patch]:
    """Return the patches of graphs and pools."""
    return [
        Callback(_forget_stream, _forget_stream),
        replaced_function(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", _is_capturing),
        replaced_function(torch.cuda.graphs, "_graph_pool_handle", _pool_handle),
        replaced_function(torch.cuda.CUDAGraph, "__new__", _new_graph),
        replaced_function(torch.cuda.MemPool, "__new__", _no_pool),
    ]
