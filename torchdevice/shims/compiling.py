"""``torch.compile``: the compilers are told the truth about CUDA.

Dynamo runs the program's code and must see what the program sees. What Dynamo hands a graph to, the modules of the
compilers while they are imported, and whoever asks whether Triton can be used, must see the machine as it is: no CUDA
code is to be made, and torch remembers the answers for the rest of the process.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import _device_constructors

from torchdevice import _active
from torchdevice._journal import Fidelity
from torchdevice._patching import (
    Callback,
    Patch,
    Replaced,
    ReplacedItem,
    per_scope,
    replaced_everywhere,
    replaced_function,
)
from torchdevice._private import require
from torchdevice._spelling import ACCELERATORS
from torchdevice.bindings.device import DeviceProperties
from torchdevice.shims import mode_beside
from torchdevice.shims.device_interface import Interfaces
from torchdevice.shims.importing import Importing
from torchdevice.shims.stream_types import StreamStandIn, new_stream

if TYPE_CHECKING:
    from torchdevice._scope import Scope


_PACKAGE = Path(__file__).parent.parent

_TRACED = {(_PACKAGE / name).as_posix() for name in ("_mode.py", "_rewriters.py", "_scope.py", "_tracing.py")}
"""The files of this package that Dynamo traces with a program; it leaves the others to Python."""


class _Skipped:
    """Dynamo compiles no frame of this package by itself, and traces only some files with what calls them.

    What Dynamo skips it keeps as one regular expression, which takes longer to make than a scope to enter: kept here.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._with_us: Any = None

    def install(self) -> None:
        trace_rules = torch._dynamo.trace_rules
        before = require(trace_rules, "SKIP_DIRS_RE")
        if self._with_us is None or before is not self._before:
            self._before = before
            trace_rules.add("torchdevice")
            self._with_us = trace_rules.SKIP_DIRS_RE
            trace_rules.SKIP_DIRS[:] = [each for each in trace_rules.SKIP_DIRS if not each.startswith(str(_PACKAGE))]
        trace_rules.SKIP_DIRS_RE = self._with_us
        require(trace_rules, "get_mod_inlinelist")().update(_TRACED)

    def remove(self) -> None:
        trace_rules = torch._dynamo.trace_rules
        trace_rules.get_mod_inlinelist().difference_update(_TRACED)
        trace_rules.SKIP_DIRS_RE = self._before


class _WhenImported:
    """The patches of Dynamo: where it calls a compiler, ``reset``, and what it must not trace.

    Put in as soon as Dynamo is imported.
    """

    def __init__(self) -> None:
        self._importing = Importing("torch._dynamo", self.install)
        self._patches: list[Patch] = []
        self._inductor: Patch | None = None
        self._skipped = _Skipped()
        self._interfaces = Interfaces()
        self._seen_generators: set[type] = set()

    def install(self) -> None:
        if "torch._dynamo.output_graph" not in sys.modules:
            self._importing.install()
            return
        if not self._patches:
            self._put_in()
        if not self._inductor and "torch._inductor.output_code" in sys.modules:
            graph = require(sys.modules["torch._inductor.output_code"], "CompiledFxGraph")
            self._inductor = replaced_function(graph, "__call__", _run_compiled)
            self._inductor.install()
        scope = _active.state.scope
        if scope is not None:
            self._interfaces.add(scope.runtime, scope.device_count)
            self._trace_generators(scope.runtime.generator_type)

    def _trace_generators(self, cls: type[torch.Generator]) -> None:
        """Let Dynamo see generators of a class as it sees torch's own: it looks for that very class."""
        if cls is not torch.Generator:
            builder: Any = torch._dynamo.variables.builder.VariableBuilder
            require(builder, "_type_dispatch")()[cls] = require(builder, "wrap_user_defined")
            self._seen_generators.add(cls)

    def _put_in(self) -> None:
        output_graph = sys.modules["torch._dynamo.output_graph"]
        self._patches = [
            replaced_function(output_graph.OutputGraph, "call_user_compiler", _call_compiler),
            *_stream_patches(),
            replaced_function(torch._dynamo, "reset", _truthfully),
            self._skipped,
            Replaced(
                torch._dynamo.variables.ctx_manager.AutocastModeVariable,
                "create",
                lambda original: staticmethod(per_scope(original, _traced_autocast)),
            ),
            Callback(_add_constants, _remove_constants),
            *mode_beside.patches(),
            self._interfaces,
        ]
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        self._importing.remove()
        if self._inductor is not None:
            self._inductor.remove()
            self._inductor = None
        while self._seen_generators:
            torch._dynamo.variables.builder.VariableBuilder._type_dispatch().pop(self._seen_generators.pop(), None)
        while self._patches:
            self._patches.pop().remove()


_dynamo = _WhenImported()


def _stream_patches() -> list[Patch]:
    utils, guards, names = torch._dynamo.utils, torch._dynamo.guards, mode_beside.names_in_guards()
    found: list[Patch] = [
        replaced_function(utils, "build_stream", _build_stream),
        replaced_function(utils, "build_event", _build_event),
    ]
    for module in (utils, guards):
        if hasattr(module, "get_current_stream"):
            found.append(replaced_function(module, "get_current_stream", _current_stream))
    if "___get_current_stream" in names:
        found.append(ReplacedItem(names, "___get_current_stream", lambda own: per_scope(own, _current_stream)))
    return found


def _run_compiled(scope: Scope, original: Any, self: Any, inputs: Any) -> Any:
    """Where Inductor's code runs, forward and backward: its devices are the target's, and no mode need see it."""
    with torch._C.DisableTorchFunction():
        return original(self, inputs)


def _build_stream(scope: Scope, original: Any, args: Any, kwargs: Any) -> Any:
    """Where compiled code makes a stream: of torch's class in C, which knows no stand-in."""
    return torch.Stream(*args, **kwargs)


def _current_stream(scope: Scope, original: Any, device: torch.device) -> Any:
    """Where compiled code and its guards ask for the current stream, each time: a function in C in torch 2.15."""
    index = scope.thread.device_index if device.index is None else device.index
    stream_id = scope.thread.streams.get(index, 0)
    return new_stream(scope, StreamStandIn, stream_id=stream_id, device_index=index)


def _build_event(scope: Scope, original: Any, args: Any, kwargs: Any) -> Any:
    generic = "device" in kwargs or any(isinstance(value, (str, torch.device)) for value in args)
    return torch.Event(*args, **kwargs) if generic else torch.cuda.Event(*args, **kwargs)


def _traced_autocast(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Where Dynamo meets ``torch.autocast``: in a graph it is that of the target, and nothing stands beside it."""
    found = original(*args, **kwargs)
    device_type, dtype, *rest = found.target_values
    if device_type in ACCELERATORS or device_type == scope.kind:
        fitting = scope.runtime.autocast_dtype(dtype or torch.get_autocast_dtype(device_type))
        found.target_values = [scope.kind, fitting, *rest]
    return found


def _add_constants() -> None:
    """Let Dynamo take for constants what does not change in a scope, and show modes all factories (not so in 2.10)."""
    tracing = torch._dynamo.variables.torch
    constants: Any = require(tracing, "constant_fold_functions")
    constants[torch.cuda.device_count] = None
    require(torch._dynamo.utils, "common_constant_types").add(DeviceProperties)
    overridable = require(tracing, "get_overridable_functions")()
    _shown.extend(_device_constructors() - overridable)
    overridable.update(_shown)


def _remove_constants() -> None:
    tracing = torch._dynamo.variables.torch
    constants: Any = tracing.constant_fold_functions
    constants.pop(torch.cuda.device_count, None)
    torch._dynamo.utils.common_constant_types.discard(DeviceProperties)
    tracing.get_overridable_functions().difference_update(_shown)
    _shown.clear()


_shown: list[Any] = []
"""Functions that Dynamo calls without asking modes otherwise."""


def _truthfully(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    with _active.suspended(compiling=True):
        return original(*args, **kwargs)


def _call_compiler(scope: Scope, original: Any, self: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
    """Where Dynamo hands a graph to a compiler. Where Inductor has no code for the device, the graph runs as it is."""
    compiler = self.compiler_fn
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    _forget_unused_stream(gm)
    by_inductor = isinstance(compiler, require(torch, "_TorchCompileInductorWrapper"))
    if by_inductor and not scope.runtime.compiles:
        scope.report("torch.compile with inductor", "the graph, run operator by operator", Fidelity.APPROXIMATE)
        return gm.forward
    compiled = _truthfully(scope, original, self, gm, *args, **kwargs)
    beside_the_stack = _active.state.traced is not None
    return compiled if by_inductor and beside_the_stack else _unseen(compiled)


def _forget_unused_stream(gm: torch.fx.GraphModule) -> None:
    """Keep compiled code from looking the current stream up at each call, as on accelerators, if its graph has none.

    Torch from 2.13 on registers the stream before it traces anything else.
    """
    registry: Any = torch._dynamo.graph_bytecode_inputs
    registered = require(registry, "index_to_bytecode_constructor")
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    names = (str(node.target) for graph in graphs for node in graph.nodes)
    only_current = hasattr(registry, "CURRENT_STREAM_INDEX") and len(registered) == 1
    if only_current and not any("stream" in name or "external_object" in name for name in names):
        registered.clear()


def _unseen(compiled: Any) -> Any:
    """Return compiled code as run without the mode: what it does on devices was decided when it was traced."""

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return compiled(*args)

    return run


def _export(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    with _active.suspended(compiling=True):
        importlib.import_module("torch._inductor.compile_fx")
    _dynamo.install()
    return original(*args, **kwargs)


def _compile(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> Any:
    backend = kwargs.get("backend", "inductor")
    with _active.suspended(compiling=True):
        if backend == "inductor":
            importlib.import_module("torch._inductor.compile_fx")
        elif isinstance(backend, str):
            torch._dynamo.list_backends(None)
        asked = _asked_of_triton(kwargs) if scope.kind not in {"cuda", "xpu"} else []
    _dynamo.install()
    for option in asked:
        scope.report(f"torch.compile with {option}", "nothing: there is no Triton", Fidelity.INERT)
    return original(*args, **kwargs)


def _asked_of_triton(kwargs: dict[str, Any]) -> list[str]:
    """Return what these arguments of ``torch.compile`` ask for that only Inductor's code in Triton heeds."""
    backend = kwargs.get("backend", "inductor")
    if backend != "inductor":
        return ["backend cudagraphs"] if backend == "cudagraphs" else []
    modes = importlib.import_module("torch._inductor").list_mode_options()
    options = {**modes.get(kwargs.get("mode"), {}), **(kwargs.get("options") or {})}
    return [name for name, value in options.items() if name.startswith("triton.") and value]


def patches() -> list[Patch]:
    """Return the patches of ``torch.compile``, of Dynamo and of the questions about Triton."""
    triton = importlib.import_module("torch.utils._triton")
    questions = [name for name, function in vars(triton).items() if hasattr(function, "cache_clear")]
    return [
        replaced_function(torch, "compile", _compile),
        replaced_function(importlib.import_module("torch.export"), "export", _export),
        _dynamo,
        *(replaced_everywhere(triton, name, _truthfully) for name in questions),
    ]
