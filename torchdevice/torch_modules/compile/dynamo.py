"""Patches of Dynamo: its view of a scope, how it compiles graphs, and how their code runs.

Dynamo and Inductor ask about a device through torch's ``DeviceInterface``, of which scopes register
one for their devices. ``torch.cuda`` answers for the target in a scope. So a target for which torch
has no interface gets that of CUDA, except for the answers about Triton. The interfaces are
registered while scopes are active.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._device import _device_constructors

from torchdevice.calls import traced
from torchdevice.calls.interruptions import lets_handlers_run
from torchdevice.errors import FidelityError
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import LATER, Late
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_properties import DeviceProperties
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.patching import (
    Added,
    Patch,
    Replaced,
    ReplacedItem,
    in_every_thread,
    per_context,
    replaced_function,
)
from torchdevice.kernel.python.library_files import PACKAGE
from torchdevice.torch_modules.apis import autocast_lists
from torchdevice.torch_modules.apis.autocast import dtype_on_target
from torchdevice.torch_modules.compile import unstacked_mode
from torchdevice.torch_modules.cuda import device_queries
from torchdevice.torch_modules.cuda.streams import current_stream


def _exchange(name: str) -> Callable[[Any], Any]:
    """Return ``make`` of a patch of ``torch.cuda._<name>_device``, also for tracing backends."""

    def exchange(device: int) -> int:
        context = thread_state.answering()
        if context is None or "cuda" not in context.names.stood_for:
            return getattr(torch.cuda, f"_{name}_device")(device)  # type: ignore[no-any-return]
        return device_queries.exchange_device(context, device)

    return lambda original: staticmethod(exchange)


def _registry() -> Any:
    return torch._dynamo.device_interface


@functools.cache
def stand_in(runtime: Runtime) -> type:
    """Return the interface of a device for which torch has none."""
    cuda = _registry().CudaInterface

    # CUDA's answers hold, as `torch.cuda` answers for the target; others are overridden.
    class StandInInterface(cuda):  # type: ignore[misc, valid-type]
        class Worker(cuda.Worker):  # type: ignore[misc, name-defined]
            get_device_properties = staticmethod(
                lambda device=None: torch.cuda.get_device_properties(device)
            )

        is_available = staticmethod(runtime.is_available)
        device_count = staticmethod(runtime.device_count)
        # Compiled code passes it to kernels, which have no streams here.
        get_raw_stream = staticmethod(lambda device_idx: 0)
        is_triton_capable = staticmethod(lambda device=None: False)

        @classmethod
        def raise_if_triton_unavailable(cls, device: Any = None) -> None:
            raise RuntimeError(
                f"Triton makes no code for {runtime.target!r}. Use backend='aot_eager' or the CPU."
            )

    # Shown in Dynamo's logs and errors.
    StandInInterface.__name__ = f"{runtime.device_type.capitalize()}Interface"
    return StandInInterface


class _DynamoPatches(Late):
    """The patches of Dynamo, installed once it is imported, and interfaces of active scopes."""

    is_plain = False

    def __init__(self) -> None:
        super().__init__("torch._dynamo", lambda _: self._make())
        self._in_place = False
        self._interfaces: dict[str, Any] = {}  # those that were added to torch's

    def install(self) -> None:
        # Without this module `_make` has nothing to patch: Dynamo is not wholly imported.
        if "torch._dynamo.output_graph" not in sys.modules:
            return
        if not self._in_place:
            super().install()
            # Outside the scope: torch registers an interface for each device of `torch.cuda`.
            with thread_state.suspended():
                if not _registry()._device_initialized:
                    _registry().init_device_reg()
            self._in_place = True
        context = thread_state.state.context
        if context is not None:
            self._add_interfaces(context.runtime, context.devices.count)
            # Dynamo finds torch's own generators by their exact class, a key of its table.
            cls = context.runtime.supplied.generator_type
            builder = torch._dynamo.variables.builder.VariableBuilder
            if cls not in builder._type_dispatch():
                self.patches.append(
                    Added(builder._type_dispatch(), {cls: builder.wrap_user_defined})
                )
                self.patches[-1].install()

    def _make(self) -> list[Patch]:
        output_graph, variables = sys.modules["torch._dynamo.output_graph"], torch._dynamo.variables
        tensor = variables.tensor.TensorVariable
        autocast = variables.ctx_manager.AutocastModeVariable
        interface, manager = _registry().CudaInterface, variables.ctx_manager.CUDADeviceVariable
        modes, tracing = variables.torch_function.SymbolicTorchFunctionState, variables.torch
        overridable, exchanges = tracing.get_overridable_functions(), ("exchange", "maybe_exchange")
        return [
            replaced_function(output_graph.OutputGraph, "call_user_compiler", _call_compiler),
            replaced_function(output_graph.OutputGraph, "init_ambient_guards", _guard_by_key),
            *_stream_patches(),
            replaced_function(torch._dynamo, "reset", truthfully),
            Replaced(torch._dynamo.trace_rules, "SKIP_DIRS_RE", _skipping_ours),
            Replaced(
                torch._dynamo.trace_rules, "is_torch_inline_allowed", in_every_thread(_inline)
            ),
            Replaced(
                autocast,
                "create",
                lambda original: staticmethod(per_context(original, _traced_autocast)),
            ),
            *(
                replaced_function(tensor, name, _read)
                for name in ("method_attr_device", "method_attr_is_cuda")
            ),
            replaced_function(modes, "call_torch_function_mode", _call_higher_order),
            # Folded as a constant: the number is a part of the key that guards the code.
            Added(tracing.constant_fold_functions, {torch.cuda.device_count: None}),
            Added(torch._dynamo.utils.common_constant_types, {DeviceProperties}),
            # torch 2.10 passes some factories to no mode.
            Added(overridable, _device_constructors() - overridable),
            *unstacked_mode.patches(),
            # Functions that torch bound when Dynamo was imported; without CUDA in the build they
            # raise. The second are those of torch 2.13 and later.
            *(Replaced(interface, f"{name}_device", _exchange(name)) for name in exchanges),
            *(
                Replaced(manager, f"_{name}_fn", _exchange(name), may_be_absent=True)
                for name in exchanges
            ),
        ]

    def _add_interfaces(self, runtime: Runtime, devices: int) -> None:
        """Register the scope's target, and its ``devices`` CUDA devices, with and without index."""
        registry = _registry()
        cuda = registry.CudaInterface
        target = registry.device_interfaces.get(runtime.device_type) or stand_in(runtime)
        # `dict.fromkeys` drops a family that is the device type itself, and keeps the order.
        own = [
            (kind, target, runtime.device_count())
            for kind in dict.fromkeys((runtime.device_type, runtime.family))
        ]
        for kind, interface, count in (*own, ("cuda", cuda, devices)):
            for name in (kind, *(f"{kind}:{index}" for index in range(count))):
                if name not in registry.device_interfaces:
                    # A name that is there belongs to torch or the program.
                    self._interfaces[name] = interface
                    registry.register_interface_for_device(name, interface)

    def remove(self) -> None:
        self._in_place = False
        for name, interface in list(self._interfaces.items()):
            # Not one that the program has registered in its place.
            if _registry().device_interfaces.get(name) is interface:
                _registry().device_interfaces.pop(name, None)
            self._interfaces.pop(name, None)
        super().remove()


WHEN_IMPORTED = LATER["torch._dynamo"] = _DynamoPatches()


def _skipping_ours(skipped: re.Pattern[str]) -> re.Pattern[str]:
    """Return an expression of the folders, including this package's, that Dynamo skips."""
    return re.compile(rf"{skipped.pattern}|^[^\s<]*{re.escape(Path(PACKAGE).as_posix())}/")


def _inline(original: Any, filename: str) -> bool:
    """Return whether Dynamo traces functions of a file that a traced function calls.

    The set of files that ``original`` reads is a cache, which ``init_process_group`` drops.
    """
    # Files of `traced.py` and its like are inlined, since they stand in for the handler.
    return filename in traced.files() or original(filename)


def _guard_by_key(context: Context, original: Any, self: Any) -> Any:
    """Stand in for ``OutputGraph.init_ambient_guards``: guard each frame by the context's key too.

    The key covers whatever the frame asks of the context.
    """
    WHEN_IMPORTED.install()  # the context may be another one than at the last installation
    result = original(self)
    sources, guards = torch._dynamo.source, torch._dynamo.guards
    mode = unstacked_mode.source_of_mode()
    if mode is not None:
        devices = sources.AttrSource(sources.AttrSource(mode, "context"), "devices")
        key = sources.AttrSource(devices, "key")
        # By equality and not identity: another scope with the same options may use the code.
        self.guards.add(key.make_guard(guards.GuardBuilder.EQUALS_MATCH))
    return result


def _stream_patches() -> list[Patch]:
    utils = torch._dynamo.utils
    guards = torch._dynamo.guards
    names = unstacked_mode.names_in_guards()
    found: list[Patch] = [
        # Torch would use `torch._C.Stream`, which makes no stand-ins.
        replaced_function(
            utils, "build_stream", lambda _, original, args, kwargs: torch.Stream(*args, **kwargs)
        ),
        replaced_function(utils, "build_event", _build_event),
    ]
    for module in (utils, guards):
        # Both modules have imported the function by value.
        if hasattr(module, "get_current_stream"):  # written in C in torch 2.15
            found.append(replaced_function(module, "get_current_stream", _current_stream))
    if "___get_current_stream" in names:
        found.append(
            ReplacedItem(
                names, "___get_current_stream", lambda own: per_context(own, _current_stream)
            )
        )
    return found


def without_modes(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run compiler code without the program's modes on the stack: its devices are real already."""
    with torch._C.DisableTorchFunction():
        return original(*args, **kwargs)


def _current_stream(context: Context, original: Any, device: torch.device) -> Any:
    """Return the current stream, which compiled code and its guards ask for at each call."""
    return current_stream(
        context, context.thread.device_index if device.index is None else device.index
    )


def _build_event(context: Context, original: Any, args: Any, kwargs: Any) -> Any:
    # Without a device in its arguments the program has asked for an event of CUDA.
    generic = "device" in kwargs or any(isinstance(value, (str, torch.device)) for value in args)
    return torch.Event(*args, **kwargs) if generic else torch.cuda.Event(*args, **kwargs)


def _traced_autocast(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``AutocastModeVariable.create``: autocast in a graph is that of the target."""
    found = original(*args, **kwargs)
    # `target_values` are the arguments of the region as the graph will have them.
    device_type, dtype, enabled, *rest = found.target_values
    is_lower = dtype in (None, torch.float16, torch.bfloat16)
    if device_type not in context.names.families and not is_lower:
        enabled = False  # as torch says, with a warning, where it is made outside a graph
    if device_type in context.names.families or device_type == context.device_type:
        fitting = dtype_on_target(
            context, dtype or torch.get_autocast_dtype(device_type), enabled=enabled
        )
        # The spare name distinguishes the graph from a program's that uses the CPU's own lists.
        named = (
            context.device_type
            if context.runtime.support.autocast_key is None
            else autocast_lists.SPARE
        )
        found.target_values = [named, fitting, enabled, *rest]
    return found


def _read(context: Context, original: Any, self: Any, tx: Any) -> Any:
    """Read ``x.device`` or ``x.is_cuda`` in compiled code as the scope does; the key covers it."""
    device = self.device
    # A device of another type, or no identity of the program: torch's own answer.
    if device is None or context.shown_as is None or device.type != context.device_type:
        return original(self, tx)
    shown = (
        context.devices.shown(device)
        if original.__name__ == "method_attr_device"
        else context.shown_as == "cuda"
    )
    return torch._dynamo.variables.VariableTracker.build(tx, shown)


def _call_higher_order(
    context: Context, original: Any, self: Any, tx: Any, fn: Any, types: Any, *call: Any
) -> Any:
    """Call higher-order operators with the mode: ``SymbolicTorchFunctionState``'s method.

    torch takes a mode off the stack while the mode handles a call. The functions that a
    higher-order operator traces in that time, such as the branches of ``torch.cond``, would be
    traced without it.
    """
    higher_order = torch._dynamo.variables.higher_order_ops.TorchHigherOrderOperatorVariable
    # The mode that handles the call is still the last one in Dynamo's picture of the stack.
    serves = isinstance(self.mode_stack[-1].realize().value, thread_state.ContextMode)
    if serves and isinstance(fn, higher_order) and not types.items:
        return fn._call_function(tx, *call)
    return original(self, tx, fn, types, *call)


@lets_handlers_run
def truthfully(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``original`` as if no scope were active: a compiler sees the real machine."""
    with thread_state.suspended(compiling=True):
        return original(*args, **kwargs)


def _call_compiler(
    context: Context, original: Any, self: Any, gm: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compile a graph. Its code runs without modes, unless Inductor's needs none stacked."""
    compiler = self.compiler_fn
    # A backend may be wrapped by several of Dynamo's decorators.
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    # From 2.13 on, Dynamo registers an accelerator's current stream before it traces anything else.
    # Compiled code whose graph uses no stream would look that up at each call.
    registry: Any = torch._dynamo.graph_bytecode_inputs
    registered = registry.index_to_bytecode_constructor
    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    names = (str(node.target) for graph in graphs for node in graph.nodes)
    only_current = hasattr(registry, "CURRENT_STREAM_INDEX") and len(registered) == 1
    if only_current and not any("stream" in name or "external_object" in name for name in names):
        registered.clear()
    try:
        compiled = truthfully(context, original, self, gm, *args, **kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        refused = error.inner_exception
        if isinstance(refused, FidelityError):
            raise unstacked_mode.GraphRefusedError(refused.requested, refused.done) from None
        raise
    is_inductor = isinstance(compiler, torch._TorchCompileInductorWrapper)
    if is_inductor and thread_state.state.traced is not None:
        return compiled
    return functools.update_wrapper(functools.partial(without_modes, context, compiled), compiled)


def obstacle(context: Context, gm: torch.fx.GraphModule) -> str:
    """Return why Inductor cannot compile a graph, which then runs eagerly; "" if it can."""
    found = (
        ""
        if _has_code_for(context, gm)
        else f"Inductor makes no code for {context.runtime.target!r}"
    )
    return found or context.runtime.obstacle(gm, context)


def _has_code_for(context: Context, gm: torch.fx.GraphModule) -> bool:
    """Return whether Inductor has code for a graph's backward on the target."""
    if context.runtime.support.compiles_flex_backward or not torch.is_grad_enabled():
        # Only backward lacks code, so a forward without gradients compiles.
        return True
    calls = (node for node in gm.graph.nodes if str(node.target) == "flex_attention")
    inputs = (each.meta.get("example_value") for node in calls for each in node.all_input_nodes)
    return not any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)
