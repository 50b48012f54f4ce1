"""CUDA graphs, for ``torch/cuda/graphs.py``."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import REPLACED, imported_by_value, replaces, supplied_function
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_memory import PrivatePools, new_id
from torchdevice.kernel.journal.callers import program_line, warn_at
from torchdevice.kernel.patching import Callback
from torchdevice.kernel.stand_ins import refuse_to_pickle
from torchdevice.torch_modules.cuda.capture_rules import (
    INVALIDATED,
    NOT_PERMITTED,
    CaptureOrder,
    error,
)
from torchdevice.torch_modules.cuda.graph_capture import Capture


@supplied_function("_graph_pool_handle")
def graph_pool_handle(context: Context) -> tuple[int, int]:
    """Return a new identifier of a memory pool."""
    return new_id()


_HOOKED = ("capture_start", "capture_end", "post_instantiate", "replay_start", "replay_end")
"""The moments at which torch runs the hooks of a graph."""


_EMPTY_GRAPH = (
    "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on "
    "wrong device or stream."
)


_POOL_OF_NO_CAPTURE = "Called CUDAGraph::pool() without a preceding successful capture."


_REPLAY_OF_NO_CAPTURE = "Called CUDAGraph::replay without a preceding successful capture."


_CAPTURED_TWICE = (
    "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new "
    "instance."
)


_CAPTURE_ON_THE_DEFAULT_STREAM = (
    "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to "
    "replay them on the default stream.)"
)


class GraphStandIn:
    """Stands in for ``torch.cuda.CUDAGraph``: records operators once and runs them again."""

    __reduce_ex__ = refuse_to_pickle

    # isinstance(graph, torch.cuda.CUDAGraph) holds.
    __class__ = property(lambda self: torch.cuda.CUDAGraph)  # type: ignore[assignment]

    def __init__(self, context: Context):
        self._context = context
        self._capture: Capture | None = None
        self._captured: Capture | None = None
        self._pool: Any = None
        self._release: Callable[[], Any] = int  # does nothing: the graph keeps no pool
        self._pools: PrivatePools | None = None
        self._end_order: Callable[[], Any] = int  # does nothing: no order is followed
        self._retained: list[Any] = []
        self._generators: list[torch.Generator] = []
        self._is_debugged = False
        # Torch.cuda.graph adds to it (torch 2.15 and later).
        self._recorded_exec_ids: set[int] = set()
        for moment in _HOOKED:
            # Ordered: hooks run in the order in which they were registered.
            setattr(self, f"_{moment}_hooks", collections.OrderedDict())

    def __repr__(self) -> str:
        return (
            f"<{self.__class__.__module__}.{self.__class__.__qualname__} object at {id(self):#x}>"
        )

    def __getattr__(self, name: str) -> Any:
        """Return torch's own methods that register hooks (torch 2.14 and later)."""
        if not name.startswith("register_") or not hasattr(torch.cuda.CUDAGraph, name):
            raise AttributeError(f"'CUDAGraph' object has no attribute {name!r}")
        # Torch's own methods, called with the stand-in in place of a graph.
        return functools.partial(getattr(torch.cuda.CUDAGraph, name), self)

    def _run_hooks(self, moment: str) -> None:
        """Run the hooks that are registered for all graphs, then those of this graph."""
        global_hooks = getattr(
            torch.cuda.graphs, f"_global_{moment.removeprefix('post_')}_hooks", None
        )
        if global_hooks:
            stand_in: Any = self  # for hooks that are annotated with torch's own class
            torch.cuda.graphs._run_global_hooks(global_hooks, stand_in)  # type: ignore[attr-defined]
        for hook in list(getattr(self, f"_{moment}_hooks").values()):
            hook(self)

    def retain_object(self, value: Any) -> None:
        """Keep an object alive as long as the graph."""
        self._retained.append(value)

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Let the graph draw from another generator: each replay, not the capture, advances it."""
        # By identity: generators define no equality of their own.
        if not any(known is generator for known in self._generators):
            self._generators.append(generator)

    def capture_begin(
        self,
        pool: Any = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Start to record operators. :meth:`capture_end` restores the tensors they write to."""
        thread = self._context.thread
        if thread.capture is not None:
            raise error(NOT_PERMITTED)
        stream = index, stream_id = thread.stream()
        # Id 0 is the default stream, on which CUDA refuses a capture.
        if not stream_id:
            raise RuntimeError(_CAPTURE_ON_THE_DEFAULT_STREAM)
        if self._captured is not None:
            raise RuntimeError(_CAPTURED_TWICE)
        runtime = self._context.runtime
        index = self._context.devices.target_index(index)
        generator = runtime.default_generator(index)
        self._pool = new_id(for_graph=True) if pool is None else tuple(pool)
        self._capture = thread.capture = Capture(runtime, [generator, *self._generators])
        self._capture.order = CaptureOrder(self._context, self._capture, stream, capture_error_mode)
        self._end_order = self._context.observers.add(self._capture.order)
        # A capture that the program never ends must not stay with the thread.
        thread.at_exit.append(self._abandon)
        context = self._context
        capture = self._capture
        self._pools = runtime.supplied.private_pools(index)
        if self._pools is not None:  # what the capture allocates comes from the graph's pool
            # A second capture of the graph gives up the pool of the first.
            self._release()
            self._pools.keep_private(self._pool)
            # The pool is kept until the graph ends, whether or not the program resets it.
            self._release = weakref.finalize(self, self._pools.release_private, self._pool)
            self._pools.route(self._pool, lambda: context.thread.capture is capture)
        self._capture.__enter__()
        self._run_hooks("capture_start")

    def _end_following(self) -> None:
        self._end_order()
        if self._pools is not None:
            self._pools.unroute(self._pool)

    def _abandon(self) -> None:
        """Leave a capture that the program did not end before it left the scope."""
        # All three at once, so that an interrupt leaves no half of them.
        capture, self._capture, self._context.thread.capture = self._capture, None, None
        if capture is not None:
            self._end_following()
            capture.__exit__(None, None, None)
            capture.put_back()
            self._release()

    def capture_end(self) -> None:
        """End the capture."""
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("capture_end() was called without capture_begin()")
        self._context.thread.at_exit.remove(self._abandon)
        capture.__exit__(None, None, None)
        # Before the tensors are restored, which is no part of the graph.
        self._context.thread.capture = None
        self._end_following()
        capture.wait_for_begun()
        # Nothing is computed during a capture on CUDA.
        capture.put_back()
        capture.check_memory()
        self._context.observers.tell("graph_captured", id(self), self._pool, capture)
        if capture.failed:
            raise error(INVALIDATED)
        capture.order.check_end()
        if not capture.steps:
            warn_at(program_line(), UserWarning(_EMPTY_GRAPH), UserWarning)
        self._captured = capture
        self._run_hooks("capture_end")
        self.instantiate()

    def instantiate(self) -> None:
        """Run the hooks. A captured graph can be replayed without being instantiated."""
        self._run_hooks("post_instantiate")

    def replay(self) -> None:
        """Run the recorded operators again and write their results to the recorded memory."""
        if self._captured is None:
            raise RuntimeError(_REPLAY_OF_NO_CAPTURE)
        self._run_hooks("replay_start")
        try:
            self._captured.replay()
            self._context.observers.tell(
                "graph_replayed", id(self), self._pool, self._context.thread.device_index
            )
        finally:
            self._run_hooks("replay_end")

    def reset(self) -> None:
        """Drop the captured graph, the retained objects and the registered generators."""
        self._captured = None
        self._retained.clear()
        self._generators.clear()
        self._release()

    def pool(self) -> Any:
        """Return the id of the memory pool in which a simulated device allocates in captures."""
        if self._captured is None:
            raise RuntimeError(_POOL_OF_NO_CAPTURE)
        return self._pool

    def enable_debug_mode(self) -> None:
        """Let :meth:`debug_dump` write the graph."""
        self._is_debugged = True

    def debug_dump(self, debug_path: str) -> None:
        """Write the captured operators to a file, one after the other, in Graphviz's language."""
        if not self._is_debugged:
            message = "CUDA Graphs debug not enabled, set with [graph].enable_debug_mode()"
            warn_at(program_line(), UserWarning(message), UserWarning)
        elif self._captured is not None:
            nodes = [f'"{place} {step.op}"' for place, step in enumerate(self._captured.steps)]
            Path(debug_path).write_text(f"digraph captured {{\n{' -> '.join(nodes)}\n}}\n")

    def raw_cuda_graph(self) -> NoReturn:
        """Raise: there is no ``cudaGraph_t``."""
        thread_state.refuse(
            "torch.cuda.CUDAGraph.raw_cuda_graph", "There is no cudaGraph_t. Use replay()."
        )

    raw_cuda_graph_exec = get_graph_data = raw_cuda_graph


@replaces(torch.cuda.CUDAGraph, "__new__")
def _new_graph(
    context: Context, original: Any, cls: type, keep_graph: bool = False
) -> GraphStandIn:
    return GraphStandIn(context)


# In C.
_forget_stream = functools.partial(setattr, torch.cuda.graph, "default_capture_stream", None)
REPLACED.append(Callback(_forget_stream, _forget_stream))
imported_by_value(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing _graph_pool_handle")


# torch 2.14 takes any answer of the package cuda-bindings but one for the driver's, also where
# there is no driver.
replaces("torch.cuda._graph_annotations", "_is_tools_id_unavailable", native_to="cuda")(
    lambda *_: True
)
