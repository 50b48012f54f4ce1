"""TorchScript: device constants in a graph, which no mode sees when the graph runs.

A scripted or loaded program belongs to the program that made it, so its constants stay rewritten after the scope.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchdevice._patching import Patch, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _script(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    return _rewritten(scope, original(*args, **kwargs))


def _load(scope: Scope, original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Storages without another place to go are put on the target, whatever device they are tagged with."""
    return _rewritten(scope, original(f, scope.target if map_location is None else map_location, *args, **kwargs))


def _rewritten(scope: Scope, scripted: Any) -> Any:
    seen: set[str] = set()
    for graph in _graphs(scripted):
        _rewrite(scope, graph, seen)
    return scripted


def _graphs(scripted: Any) -> Iterator[Any]:
    if isinstance(scripted, torch.jit.ScriptFunction):
        yield scripted.graph
    elif isinstance(scripted, torch.jit.ScriptModule):
        for module in scripted.modules():
            if isinstance(module, torch.jit.ScriptModule):
                yield from (module._c._get_method(name).graph for name in module._c._method_names())


def _rewrite(scope: Scope, graph: Any, seen: set[str]) -> None:
    """Exchange the accelerators among the device constants of a graph and of the functions it calls."""
    for node in _nodes(graph):
        if node.kind() != "prim::Constant":
            continue
        kind = str(node.output().type())
        if kind == "Device":
            device = scope.redirect(node.s("value"))
            if device is not None:
                node.s_("value", str(device))
        elif node.hasAttribute("name") and kind not in seen:
            seen.add(kind)
            called = torch.jit._state._python_cu.find_function(kind)  # the type of a function is its qualified name
            if called is not None:
                _rewrite(scope, called.graph, seen)


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def patches() -> list[Patch]:
    """Return the patches of ``torch.jit``."""
    return [replaced_function(torch.jit, "script", _script), replaced_function(torch.jit, "load", _load)]
