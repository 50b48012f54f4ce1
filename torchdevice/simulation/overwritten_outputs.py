"""Outputs of ``torch.compile(mode="reduce-overhead")`` that a later call overwrites.

On CUDA that mode records compiled code in CUDA graphs, whose outputs have the same memory in every
run. Torch frees the outputs of the step before when a new step begins. A step begins with a call of
a compiled function, unless the program has called ``torch.compiler.cudagraph_mark_step_begin()``,
which then begins each step; without that it does not begin while a backward is pending. Reading
such an output raises torch's error. The rules are those of ``torch/_inductor/cudagraph_trees.py``
(``CUDAGraphTreeManager``).

Torch raises for the outputs of the first two steps. From the third on it overwrites them silently;
here they raise the same error.

Limits: a graph counts only where torch records it without doubt. Graphs with tensors of the CPU, of
several devices, with symbolic sizes, or that change inputs which are no parameters or buffers have
outputs of their own.
"""

from __future__ import annotations

import importlib
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.python.library_files import PACKAGE
from torchdevice.simulation.policy import DEVICE_TYPE

_TREES = "torch._inductor.cudagraph_trees"


class Graph(NamedTuple):
    """A graph of a program that asks for recorded graphs.

    Attributes:
        device: The index of the device.
        is_recorded: Whether CUDA would record it.
        is_backward: Whether it is a backward graph.
        is_forward: Whether a backward graph belongs to it.
        traces: The program's line that made each output, as torch shows it; None for one that is
            unknown.
    """

    device: int
    is_recorded: bool
    is_backward: bool
    is_forward: bool
    traces: Sequence[str | None]


class _Output(NamedTuple):
    """An output: its memory, and the error of those who read it later."""

    memory: StorageWeakRef
    trace: str | None
    is_gradient: bool


class Overwritten(Observer):
    """Raises torch's error in kernels that use memory which a later run has overwritten."""

    def __init__(self) -> None:
        self.outputs: dict[int, _Output] = {}

    def add(self, outputs: Iterable[_Output]) -> None:
        """Take outputs whose memory was overwritten."""
        self.outputs = {
            key: each for key, each in self.outputs.items() if not each.memory.expired()
        }
        self.outputs.update((each.memory.cdata, each) for each in outputs)

    def check(self, values: Any) -> None:
        """Raise torch's error for the first tensor among these values whose memory was overwritten.

        Raises:
            RuntimeError: There is one.
        """
        for value in pytree.tree_leaves(values):
            address = _address(value) if self.outputs else None
            found = None if address is None else self.outputs.get(address)
            if found is not None and not found.memory.expired():
                raise RuntimeError(_error_text(found))

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a kernel whose tensors still have their values."""
        with torch._C.DisableTorchFunction():
            self.check((args, kwargs))
        return kernel(*args, **kwargs)


class Tree:
    """The outputs of one thread's graphs on one device, as torch's manager of recorded graphs keeps
    them.
    """

    def __init__(self) -> None:
        self._step = 0
        self._outputs: list[_Output] = []
        self.is_backward_pending = False

    def begin(self) -> list[_Output]:
        """Begin a run. Return the outputs that are alive and are overwritten from now on."""
        manager = importlib.import_module(_TREES).CUDAGraphTreeManager
        step, before = manager.get_curr_generation(), self._step
        alive = [each for each in self._outputs if not each.memory.expired()]
        marked = manager.user_invoked_mark_step()
        begins = step != before and (marked or not self.is_backward_pending)
        self._outputs, self._step = [] if begins else alive, step
        return alive if begins else []

    def end(self, graph: Graph, given: Sequence[Any], results: Sequence[Any]) -> None:
        """End a run of a graph, whose new outputs belong to the step."""
        own = {_address(each) for each in given}
        for value, trace in zip(results, graph.traces, strict=True):
            address = _address(value)
            if address is not None and address not in own:
                memory = StorageWeakRef(value.untyped_storage())
                self._outputs.append(_Output(memory, trace, graph.is_backward))

    def ran(self, graph: Graph) -> None:
        """Note whether a backward is pending after a run of a graph."""
        if graph.is_forward or graph.is_backward:
            self.is_backward_pending = graph.is_forward and graph.is_recorded


_trees: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""The policy of a context -> thread and device -> its :class:`Tree`, and the overwritten memory."""


def graph_of(
    gm: torch.fx.GraphModule, nodes: Sequence[torch.fx.Node], options: Any
) -> Graph | None:
    """Return the facts about a graph; None if the program uses no recorded graphs.

    Args:
        gm: The graph of ATen operators.
        nodes: Its nodes, and those of the graphs in it.
        options: The keyword arguments of Inductor's ``compile_fx_inner``.
    """
    config = importlib.import_module("torch._inductor.config").triton
    if not (config.cudagraphs and config.cudagraph_trees):
        return None
    leaves = pytree.tree_leaves([node.meta.get("val") for node in nodes if node.op != "output"])
    made = [each for each in leaves if isinstance(each, torch.Tensor)]
    indices = {each.device.index or 0 if each.device.type == DEVICE_TYPE else -1 for each in made}
    sizes = [size for each in made for size in each.shape]
    is_symbolic = any(isinstance(each, (torch.SymInt, torch.SymFloat)) for each in leaves + sizes)
    is_backward = bool(options.get("is_backward"))
    (outputs,) = gm.graph.output_node().args
    return Graph(
        device=max(indices),
        is_recorded=len(indices) == 1 and not is_symbolic and not _is_refused(gm, options),
        is_backward=is_backward,
        is_forward=not is_backward and not options.get("is_inference"),
        traces=[_of_program(getattr(each, "stack_trace", None)) for each in outputs],  # type: ignore[union-attr]
    )


def _is_refused(gm: torch.fx.GraphModule, options: Any) -> bool:
    """Return whether torch records no graph because of an operator, or because the graph writes to
    inputs other than parameters and buffers.
    """
    refused = importlib.import_module("torch._inductor.utils")
    if refused.get_first_incompatible_cudagraph_node(gm) is not None:
        return True
    given = gm.graph.find_nodes(op="placeholder")
    fixed = {given[index] for index in options.get("static_input_idxs") or ()}
    return any(written not in fixed for node in gm.graph.nodes for written in _written(node))


def _written(node: torch.fx.Node) -> Iterator[Any]:
    """Yield the arguments that the operator of a node writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield value


_OF_PACKAGE = re.compile(
    rf'^ *File "{re.escape(PACKAGE)}[^\n]*(?:\n(?! *File ")[^\n]*)*\n?', re.MULTILINE
)
"""A frame of this package in a trace: the line that names its file, and those up to the next."""


def _of_program(trace: str | None) -> str | None:
    """Return a trace without the frames of this package, which would not be there on CUDA."""
    return None if trace is None else _OF_PACKAGE.sub("", trace)


def run(graph: Graph | None, compute: Callable[[list[Any]], Any], given: list[Any]) -> Any:
    """Run compiled code on a list of tensors, of which it may take the tensors out.

    Args:
        graph: The facts about the code; None where the program asks for no recorded graphs.
        compute: Runs the code.
        given: Its inputs.

    Raises:
        RuntimeError: An input was overwritten. The text is torch's.
    """
    context = thread_state.answering()
    if graph is None or context is None or context.policy is None:
        return compute(given)
    trees = _trees.setdefault(context.policy, {})
    tree: Tree = trees.setdefault((threading.get_ident(), graph.device), Tree())
    if not graph.is_recorded:
        tree.ran(graph)
        return compute(given)
    overwritten: Overwritten = trees.setdefault(Overwritten, Overwritten())
    overwritten.add(tree.begin())
    _watch(context, overwritten)
    overwritten.check(given)
    inputs = list(given)
    results = compute(given)
    with torch._C.DisableTorchFunction():
        tree.end(graph, inputs, results)
    tree.ran(graph)
    return results


def _watch(context: Context, overwritten: Overwritten) -> None:
    """Let kernels be looked at while something is alive that was overwritten, and only then."""
    is_watching = overwritten in context.observers.kernels
    if overwritten.outputs and not is_watching:
        context.observers.add(overwritten)
    elif is_watching and not overwritten.outputs:
        context.observers.end(Overwritten)


def _address(value: Any) -> int | None:
    """Return the identity of a simulated tensor's memory; None for other values."""
    if not isinstance(value, torch.Tensor):
        return None
    with torch._C.DisableTorchFunction():
        if value.device.type != DEVICE_TYPE or value.layout is not torch.strided:
            return None
        try:
            return value.untyped_storage()._cdata
        except NotImplementedError:  # a wrapper of functorch has no storage
            return None


def _error_text(output: _Output) -> str:
    """Return torch's text for a read of an output that was overwritten."""
    worded = importlib.import_module(_TREES).CUDAGraphTreeManager.format_dealloc_msg
    # Since torch 2.13 gradients have a text of their own.
    if "is_grad_output" in inspect.signature(worded).parameters:
        return worded(output.trace, is_grad_output=output.is_gradient)  # type: ignore[no-any-return]
    return worded(output.trace)  # type: ignore[no-any-return]
