"""``torch.compile`` and ``torch.export``, whose compilers see the machine as it is.

Dynamo traces the program's code and must see what the program sees. The compilers that get its
graphs, the modules of these compilers while they are imported, and the functions that ask whether
Triton can be used must see no CUDA: no CUDA code is to be made, and torch keeps the answers for the
rest of the process.

Dynamo puts a launch of a Triton kernel into its graph, as it does on CUDA, and Inductor orders it
by what the kernel reads and writes. Only the code of the launch is another one: Inductor compiles
the kernel for a GPU, here torch's own operator calls it among the code that Inductor makes for the
CPU.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchdevice.calls.interruptions import lets_handlers_run
from torchdevice.calls.mode import with_mode
from torchdevice.errors import NotSupportedError
from torchdevice.kernel import thread_state, torch_internals
from torchdevice.kernel.bindings import later, replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import Patch, Replaced, original_of
from torchdevice.torch_modules.compile.dynamo import obstacle, truthfully, without_modes


@replaces(torch, "compile")
def _compile(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    for option in () if context.runtime.support.makes_kernels else _asked_of_triton(kwargs):
        context.report(
            f"torch.compile with {option}", "nothing: there is no Triton", Fidelity.INERT
        )
    return original(*args, **kwargs)


def _asked_of_triton(kwargs: dict[str, Any]) -> list[str]:
    """Return the options of this ``torch.compile`` call that affect Triton code only."""
    backend = kwargs.get("backend", "inductor")
    if backend != "inductor":
        return ["backend cudagraphs"] if backend == "cudagraphs" else []
    modes = importlib.import_module("torch._inductor").list_mode_options()
    # Options of the call win over those of the mode, as in torch.
    options = {**modes.get(kwargs.get("mode"), {}), **(kwargs.get("options") or {})}
    return [name for name, value in options.items() if name.startswith("triton.") and value]


def _compile_model(context: Context, original: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a graph of the program: every way to Inductor, except for ATen graphs, comes here."""
    ahead = importlib.import_module("torch._inductor.virtualized").V.aot_compilation
    # torch calls itself with what flattens the inputs of a graph.
    if isinstance(gm, torch.fx.GraphModule) and _runs_by_operators(context, gm, ahead=ahead):
        return gm
    # AOT Autograd's cache stores Inductor's own results only.
    keeps = (
        torch._functorch.config.enable_autograd_cache
        and context.runtime.supplied.compile_graph is None
    )
    with torch._functorch.config.patch(enable_autograd_cache=keeps):
        return original(gm, *args, **kwargs)


@lets_handlers_run
def _compile_one(context: Context, original: Any, gm: Any, inputs: Any, **options: Any) -> Any:
    """Compile an ATen graph, forward or backward. Every way to Inductor passes here."""
    if _runs_by_operators(context, gm):
        return torch._functorch.aot_autograd.make_boxed_func(gm.forward)  # type: ignore[attr-defined]
    own = context.runtime.supplied.compile_graph
    if own is not None:
        return own(original, gm, inputs, **options)
    return original(gm, inputs, **options)


_ENTRIES = ("compile_fx", "compile_fx_backward")
"""Functions that the program calls itself, or that torch calls in the program's ``backward``."""


def _runs_by_operators(context: Context, gm: Any, *, ahead: bool = False) -> bool:
    """Return whether Inductor does not compile a graph, which is then reported."""
    for node in gm.graph.nodes:  # the program may have traced it, and seen its own devices
        given = node.args, node.kwargs
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device, lambda each: context.redirect(each) or each, given
        )
    found = obstacle(context, gm)
    if found and ahead:
        raise NotSupportedError(
            "AOTInductor", f"Package the model in torchdevice.portable('cpu'), since {found}."
        )
    if found:
        context.report(
            "torch.compile with inductor", f"operator by operator: {found}", Fidelity.APPROXIMATE
        )
    return bool(found)


def _by_codegen_of_cpu(context: Context, original: Any, device: str) -> Any:
    """``get_scheduling_for_device``: the CPU's, for devices without a code generator."""
    if context.runtime.supplied.compile_graph and device == context.device_type:
        # The class: torch has a function for the CPU, and refuses that for any other device.
        return importlib.import_module("torch._inductor.codegen.cpp").CppScheduling
    return original(device)


@replaces("torch.export.pt2_archive._package:AOTICompiledModel", "__call__")
def _run_package(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    return context.runtime.supplied.call_by_host(original, args, kwargs)


@replaces("torch._dynamo.compiled_autograd:AutogradCompilerInstance", "begin_capture")
def _begin_capture(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let compiled autograd trace a compiled graph with the target's devices."""
    tracer = self.fx_tracer
    tracer.create_arg = functools.partial(original_of(type(tracer).create_arg), tracer)
    return without_modes(context, original, self, *args, **kwargs)


def for_compiler(owner: Any, name: str, replacement: Any) -> Replaced:
    """Return a patch of a compiler's function, called with a context while torch is suspended."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            context = thread_state.answering()
            if context is None:
                return original(*args, **kwargs)
            # A backward graph may be compiled where it first runs, in the program's scope and mode.
            with thread_state.suspended(compiling=True), torch._C.DisableTorchFunction():
                return replacement(context, original, *args, **kwargs)

        return function

    return Replaced(owner, name, make)


@later("torch._inductor.compile_fx")
def _patches_of_inductor(module: ModuleType) -> list[Patch]:
    torch_internals.check("later", "torch._functorch")
    return [
        for_compiler(module, "_maybe_wrap_and_compile_fx_main", _compile_model),
        for_compiler(module, "_compile_fx_inner", _compile_one),
        *(for_compiler(module, name, without_modes) for name in _ENTRIES),
    ]


@later("torch._inductor.codegen.common")
def _patches_of_codegen(module: ModuleType) -> list[Patch]:
    return [for_compiler(module, "get_scheduling_for_device", _by_codegen_of_cpu)]


replaces("torch._inductor.output_code:CompiledFxGraph", "__call__")(without_modes)

# Ranks tell each other what they compile, by a collective that names the program's device.
replaces("torch._dynamo.output_graph:OutputGraph", "run_compiler_collective", native_to="cuda")(
    with_mode
)

_TRITON = importlib.import_module("torch.utils._triton")

# The functions with a cache are the ones whose answers torch keeps.
_QUESTIONS = [name for name, function in vars(_TRITON).items() if hasattr(function, "cache_clear")]

replaces(_TRITON, *_QUESTIONS, by_value=True)(truthfully)


_LAUNCH = "triton_kernel_wrapper_mutation"


@replaces("torch._dynamo.variables.builder:VariableBuilder", "_wrap")
def _wrap(context: Context, original: Any, self: Any, value: Any) -> Any:
    """Trace a kernel. Dynamo asks ``has_triton()`` for that, which is False for a compiler."""
    triton = sys.modules.get("triton")
    if triton is None:
        return original(self, value)
    if not isinstance(value, (triton.runtime.JITFunction, triton.runtime.Autotuner)):
        return original(self, value)
    builder = importlib.import_module("torch._dynamo.variables.builder")
    self.install_guards(builder.GuardBuilder.ID_MATCH)
    return builder.TritonKernelVariable(value, None, None, source=self.source)


@later("torch._inductor.ir")
def _patches_of_ir(module: ModuleType) -> list[Patch]:
    return [
        for_compiler(module.UserDefinedTritonKernel, "codegen", _codegen),
        for_compiler(torch._ops.HigherOrderOperator, "cacheable", _cacheable),
    ]


def _codegen(context: Context, original: Any, self: Any, wrapper: Any) -> None:
    """Write a call of the operator for a launch, instead of the kernel's code for a GPU."""
    if context.runtime.support.makes_kernels:
        original(self, wrapper)
        return
    of_node = self.fx_node.kwargs
    shown = {
        name: wrapper.val_to_arg_str(self.get_kwargs_value(name)) for name in of_node["kwargs"]
    }
    arguments = ", ".join(f"{name!r}: {value}" for name, value in shown.items())
    wrapper.writeline(
        f"torch.ops.higher_order.{_LAUNCH}(kernel_idx={of_node['kernel_idx']}, "
        f"constant_args_idx={of_node['constant_args_idx']}, "
        f"grid={wrapper.val_to_arg_str(self.grid)}, tma_descriptor_metadata={{}}, "
        f"kwargs={{{arguments}}})"
    )


def _cacheable(context: Context, original: Any, self: Any) -> bool:
    """Keep code out of disk caches: it has numbers of the process's own table of kernels."""
    return original(self) and "triton_kernel" not in self.name()
