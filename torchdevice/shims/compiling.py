"""``torch.compile``: the compilers are told the truth about CUDA.

Dynamo runs the program's code and must see what the program sees. What Dynamo hands a graph to, the modules of the
compilers while they are imported, and whoever asks whether Triton can be used, must see the machine as it is: no CUDA
code is to be made, and torch remembers the answers for the rest of the process.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from torchdevice import _active
from torchdevice._journal import Fidelity
from torchdevice._patching import Callback, Patch, replaced_everywhere, replaced_function
from torchdevice._private import require

if TYPE_CHECKING:
    from torchdevice._scope import Scope


class _WhenImported:
    """The patches of Dynamo: where it calls a compiler, ``reset``, and what it must not trace.

    Put in as soon as Dynamo is imported.
    """

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def install(self) -> None:
        if self._patches or "torch._dynamo.output_graph" not in sys.modules:
            return
        output_graph = sys.modules["torch._dynamo.output_graph"]
        self._patches = [
            replaced_function(output_graph.OutputGraph, "call_user_compiler", _call_compiler),
            # Otherwise Dynamo asks the accelerator, in C, for a stream of the CPU.
            replaced_function(torch._dynamo.variables.streams.SymbolicStreamState, "__init__", _truthfully),
            replaced_function(torch._dynamo, "reset", _truthfully),
            Callback(_skip_this_package, _trace_this_package),
        ]
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        while self._patches:
            self._patches.pop().remove()


_dynamo = _WhenImported()


def _skip_this_package() -> None:
    """Let Dynamo leave the mode and its rewriters to Python: a rewritten call breaks the graph."""
    torch._dynamo.trace_rules.add("torchdevice")


def _trace_this_package() -> None:
    trace_rules = torch._dynamo.trace_rules
    trace_rules.SKIP_DIRS[:] = [folder for folder in trace_rules.SKIP_DIRS if "torchdevice" not in folder]
    require(trace_rules, "_recompile_re")()


def _truthfully(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    with _active.suspended():
        return original(*args, **kwargs)


def _call_compiler(scope: Scope, original: Any, self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
    """Where Dynamo hands a graph to a compiler. Where Inductor has no code for the device, the graph runs as it is."""
    compiler = self.compiler_fn
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    if not scope.runtime.compiles and isinstance(compiler, require(torch, "_TorchCompileInductorWrapper")):
        scope.report("torch.compile with inductor", "the graph, run operator by operator", Fidelity.APPROXIMATE)
        return gm.forward
    return _truthfully(scope, original, self, gm, *args, **kwargs)


def _compile(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    backend = kwargs.get("backend", "inductor")
    with _active.suspended():
        importlib.import_module("torch._dynamo.output_graph")
        if backend == "inductor":
            importlib.import_module("torch._inductor.compile_fx")
        elif isinstance(backend, str):
            torch._dynamo.list_backends(None)
    _dynamo.install()
    return original(*args, **kwargs)


def patches() -> list[Patch]:
    """Return the patches of ``torch.compile``, of Dynamo and of the questions about Triton."""
    triton = importlib.import_module("torch.utils._triton")
    questions = [name for name, function in vars(triton).items() if hasattr(function, "cache_clear")]
    return [
        replaced_function(torch, "compile", _compile),
        _dynamo,
        *(patch for name in questions for patch in replaced_everywhere(triton, name, _truthfully)),
    ]
