"""TorchScript: rewrites a graph's devices when scripted or loaded, as no mode sees it run.

The graph stays rewritten after the scope, because torch caches scripted functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from torchdevice.calls.lacking import float64_policy
from torchdevice.calls.mode import one_way
from torchdevice.kernel import dispatch_modes, thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import in_every_thread, original_of
from torchdevice.kernel.python import data_files

_DOUBLES = {7: torch.float64, 10: torch.complex128}
"""The dtypes that a target may lack, by their numbers in graphs (c10/core/ScalarType.h)."""


@replaces(torch.jit._script, "script", makes=True, by_value=True)
@in_every_thread
def _script(
    original: Any, obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any
) -> Any:
    """``torch.jit.script``, which finds the names that a class uses in the frame of its caller."""
    # The frames of this function and of torch's replacement.
    scripted = original(obj, optimize, _frames_up + 2, *args, **kwargs)
    context = thread_state.state.context
    return scripted if context is None else _rewritten(context, scripted)


@replaces(
    importlib.import_module("torch.jit._builtins"), "_find_builtin", makes=True, by_value=True
)
@in_every_thread
def _find_builtin(original: Any, function: Any) -> Any:
    """The table in which the compiler looks up the operator of a function of torch, by identity."""
    return original(original_of(function))


@replaces(torch.jit._serialization, "load", by_value=True)
def _load(
    context: Context, original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """``torch.jit.load``: load onto the target by default, and rewrite the graph's devices."""
    if map_location is None:
        device = context.devices.current
    else:
        device = context.redirect(map_location) or map_location
    loaded = original(f, device, *args, **kwargs)
    for graph in _graphs(loaded):
        # Torch cannot look the functions of a loaded program up by name.
        torch._C._jit_pass_inline(graph)
    return _rewritten(context, loaded)


def _rewritten(context: Context, scripted: Any) -> Any:
    rewriting = _Rewriting(context)
    for graph in _graphs(scripted):
        rewriting.rewrite(graph)
    return scripted


def _graphs(scripted: Any) -> Iterator[Any]:
    if isinstance(scripted, torch.jit.ScriptFunction):
        yield scripted.graph
    elif isinstance(scripted, torch.jit.ScriptModule):
        for module in scripted.modules():
            if isinstance(module, torch.jit.ScriptModule):
                yield from (module._c._get_method(name).graph for name in module._c._method_names())
    elif isinstance(scripted, type):
        yield from _graphs_of_class(torch.jit._state._get_script_class(scripted))
    elif isinstance(scripted, torch.jit.RecursiveScriptClass):  # type: ignore[attr-defined]
        yield from _graphs_of_class(scripted._c._type())


def _graphs_of_class(script_class: Any) -> Iterator[Any]:
    """Yield the graphs of the methods of a TorchScript class. Enums have no graphs."""
    for name in [] if script_class is None else script_class.method_names():
        method = torch.jit._state._python_cu.find_function(
            f"{script_class.qualified_name()}.{name}"
        )
        if method is not None:
            yield method.graph


class _Rewriting:
    """Rewrites graphs, and the functions they call, for the target of a context."""

    def __init__(self, context: Context):
        self._context = context
        self._seen: set[str] = set()
        accelerators = sorted(context.names.families - {context.device_type})
        index = " + spelled[len(accelerator):]" if context.devices.at(0).index is not None else ""
        values = {"accelerators": accelerators, "target": context.device_type, "index": index}
        functions = data_files.filled(__file__, "script_functions.py.jinja", **values)
        self._replacements = torch.jit.CompilationUnit(functions)

    def rewrite(self, graph: Any) -> None:
        """Rewrite a graph's devices: constants, texts, attributes, arguments and ``.cuda()``."""
        for value in list(graph.inputs()):
            if str(value.type()) == "Device":
                self._exchange(graph, value)
        for node in list(_nodes(graph)):
            self._rewrite_node(graph, node)

    def _rewrite_node(self, graph: Any, node: Any) -> None:
        kind = node.kind()
        if kind == "prim::Constant":
            self._rewrite_constant(node)
        elif kind == "aten::device":
            self._replace(graph, node, "of_text" if len(list(node.inputs())) == 1 else "of_parts")
        elif kind == "prim::GetAttr" and str(node.output().type()) == "Device":
            self._exchange(graph, node.output())
        elif kind == "aten::cuda":
            self._replace(graph, node, "cuda")
        elif kind == "aten::pin_memory" and not self._context.runtime.pins_memory:
            self._replace(graph, node, "pin_memory")
        elif kind == "prim::CallMethod":
            self._rewrite_class_of(node)
        elif kind.startswith("aten::") and self._context.dtypes.unsupported:
            self._fit_dtype(graph, node)

    def _rewrite_class_of(self, node: Any) -> None:
        """Rewrite the class whose method a node calls; it may be compiled only for this use."""
        cls: Any = next(iter(node.inputs())).type()
        if isinstance(cls, torch._C.ClassType) and cls.qualified_name() not in self._seen:
            self._seen.add(cls.qualified_name())
            for graph in _graphs_of_class(cls):
                self.rewrite(graph)

    def _rewrite_constant(self, node: Any) -> None:
        """Rewrite a constant: a device, or a function whose graph contains devices."""
        kind = str(node.output().type())
        if kind == "Device":
            device = self._context.redirect(node.s("value"))
            if device is not None:
                node.s_("value", str(device))
        elif node.hasAttribute("name") and kind not in self._seen:
            self._seen.add(kind)
            # The type of a function is its qualified name.
            called = torch.jit._state._python_cu.find_function(kind)
            if called is not None:
                self.rewrite(called.graph)

    def _fit_dtype(self, graph: Any, node: Any) -> None:
        """Fit the dtype of an operator with a constant device and a constant dtype."""
        if "device" not in node.schema() or " dtype" not in node.schema():
            return
        named = {
            each.name: place
            for place, each in enumerate(torch._C.parse_schema(node.schema()).arguments)
        }
        if not {"device", "dtype"} <= named.keys():
            return
        inputs = list(node.inputs())
        device, dtype = (_constant(inputs[named[name]]) for name in ("device", "dtype"))
        if (
            isinstance(device, torch.device)
            and dtype in _DOUBLES
            and self._context.devices.is_targets(device)
        ):
            graph.setInsertPoint(node)
            fitting = graph.insertConstant(float64_policy.fit(self._context, _DOUBLES[dtype]))
            node.replaceInput(named["dtype"], fitting)

    def _replace(self, graph: Any, node: Any, name: str) -> None:
        """Replace a node by a function of ``_REPLACEMENTS`` on the node's first inputs."""
        graph.setInsertPoint(node)
        function = getattr(self._replacements, name).inlined_graph
        number = len(list(function.inputs()))
        (made,) = graph.insertGraph(function, list(node.inputs())[:number])
        node.output().replaceAllUsesWith(made)
        node.destroy()

    def _exchange(self, graph: Any, value: Any) -> None:
        """Insert ``of_device`` between a device and each of its uses."""
        for user in [use.user for use in value.uses()]:
            graph.setInsertPoint(user)
            (made,) = graph.insertGraph(self._replacements.of_device.inlined_graph, [value])
            user.replaceInputWith(value, made)


def _constant(value: Any) -> Any:
    """Return the value of a constant of a graph; None for every other value."""
    return value.toIValue() if value.node().kind() == "prim::Constant" else None


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


@replaces(torch.jit._trace, "trace", by_value=True)
@replaces(torch.jit._trace, "trace_module", by_value=True)
def _trace(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.jit.trace``: torch records no values that a dispatch mode has handled."""
    with dispatch_modes.lifted(), one_way():
        return original(*args, **kwargs)
