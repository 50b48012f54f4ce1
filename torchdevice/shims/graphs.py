"""CUDA graphs and memory pools, which are classes on C types, and the names of ``torch._C`` imported by value there."""

from __future__ import annotations

import collections
import functools
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchdevice._capture import Capture, invalidated, not_permitted
from torchdevice._patching import Callback, Patch, replaced_function
from torchdevice._private import require
from torchdevice.bindings import graphs, streams
from torchdevice.bindings.unsupported import POOL
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope


_HOOKED = ("capture_start", "capture_end", "post_instantiate", "replay_start", "replay_end")
"""The moments at which torch runs hooks of a graph."""


class GraphStandIn:
    """A graph of the program: operators noted once and run again, in place of ``torch.cuda.CUDAGraph``."""

    __class__ = property(lambda self: torch.cuda.CUDAGraph)  # type: ignore[assignment]

    def __init__(self, scope: Scope):
        self._scope = scope
        self._capture: Capture | None = None
        self._captured: Capture | None = None
        self._pool: Any = None
        self._retained: list[Any] = []
        for moment in _HOOKED:
            setattr(self, f"_{moment}_hooks", collections.OrderedDict())

    def __getattr__(self, name: str) -> Any:
        """torch's own ways of registering hooks (torch 2.14 and later)."""
        if not name.startswith("register_") or not hasattr(torch.cuda.CUDAGraph, name):
            raise AttributeError(f"'CUDAGraph' object has no attribute {name!r}")
        return functools.partial(getattr(torch.cuda.CUDAGraph, name), self)

    def _run_hooks(self, moment: str) -> None:
        """Run what is registered for all graphs, whose errors torch ignores, and for this one."""
        everywhere = moment.removeprefix("post_")
        registered = getattr(torch.cuda.graphs, f"_global_{everywhere}_hooks", None)
        if registered:
            require(torch.cuda.graphs, "_run_global_hooks")(registered, self)
        for hook in list(getattr(self, f"_{moment}_hooks").values()):
            hook(self)

    def retain_object(self, value: Any) -> None:
        """Keep an object alive as long as the graph."""
        self._retained.append(value)

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
        thread.at_exit.append(self._abandon)
        self._capture.__enter__()
        self._run_hooks("capture_start")

    def _abandon(self) -> None:
        """Leave a capture that the program did not end within the scope."""
        capture, self._capture, self._scope.thread.capture = self._capture, None, None
        if capture is not None:
            capture.abandon()

    def capture_end(self) -> None:
        """End the capture."""
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("capture_end() was called without capture_begin()")
        self._scope.thread.at_exit.remove(self._abandon)
        capture.__exit__(None, None, None)
        self._scope.thread.capture = None
        capture.put_back()
        if capture.failed:
            raise invalidated()
        self._captured = capture
        self._run_hooks("capture_end")
        self.instantiate()

    def instantiate(self) -> None:
        """Nothing to instantiate: a captured graph can be replayed."""
        self._run_hooks("post_instantiate")

    def replay(self) -> None:
        """Run the noted operators again, into the same memory."""
        if self._captured is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._run_hooks("replay_start")
        try:
            self._captured.replay()
        finally:
            self._run_hooks("replay_end")

    def reset(self) -> None:
        """Forget what was captured."""
        self._captured = None
        self._retained.clear()

    def pool(self) -> Any:
        """Return the identifier of a memory pool, which nothing allocates from."""
        return self._pool

    def enable_debug_mode(self) -> None:
        """Nothing to enable."""

    def debug_dump(self, debug_path: str, *, verbose: bool = True) -> NoReturn:
        """There is no CUDA graph to dump."""
        raise NotSupportedError("torch.cuda.CUDAGraph.debug_dump", "There is no CUDA graph. Use torch.profiler.")

    def raw_cuda_graph(self) -> NoReturn:
        """There is none."""
        raise NotSupportedError("torch.cuda.CUDAGraph.raw_cuda_graph", "There is no cudaGraph_t. Use replay().")

    raw_cuda_graph_exec = get_graph_data = raw_cuda_graph


def _new_graph(scope: Scope, original: Any, cls: type, keep_graph: bool = False) -> GraphStandIn:
    return GraphStandIn(scope)


def _no_pool(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotSupportedError("torch.cuda.MemPool", POOL)


def _no_allocator(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotSupportedError("torch.cuda.memory.CUDAPluggableAllocator", POOL)


_BY_VALUE = (
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_beginAllocateToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
)
"""What ``torch.cuda.memory`` imports of ``torch._C`` by value, for pools."""


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
        replaced_function(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", _is_capturing, family="cuda"),
        replaced_function(torch.cuda.graphs, "_graph_pool_handle", _pool_handle, family="cuda"),
        replaced_function(torch.cuda.CUDAGraph, "__new__", _new_graph, family="cuda"),
        replaced_function(torch.cuda.MemPool, "__new__", _no_pool, family="cuda"),
        replaced_function(torch.cuda.memory.CUDAPluggableAllocator, "__init__", _no_allocator, family="cuda"),
        *(replaced_function(torch.cuda.memory, name, _no_pool, family="cuda") for name in _BY_VALUE),
    ]
