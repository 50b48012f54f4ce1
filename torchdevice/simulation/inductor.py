"""Compiles simulated graphs by Inductor, as C++ for the CPU tensors in the device's memory.

Torch divides a graph into forward and backward on the device. Inductor then compiles each for the
CPU, and what it returns is called with CPU tensors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchdevice.calls.interruptions import lets_handlers_run
from torchdevice.kernel import thread_state
from torchdevice.kernel.python.per_thread import PerThread, having
from torchdevice.simulation import device_generators, overwritten_outputs, policy
from torchdevice.simulation.kernels.cpu_kernels import CpuAliases, without_mode, wrapped
from torchdevice.simulation.policy import DEVICE_TYPE
from torchdevice.torch_modules.apis import dispatch
from torchdevice.torch_modules.cuda import device_queries

_CPU = torch.device("cpu")

Compiled = Callable[..., Any]


def obstacle(gm: torch.fx.GraphModule) -> str:
    """Return why a graph cannot be compiled for the device; "" where it can."""
    nodes = list(_nodes(gm))
    for node in nodes:
        target = getattr(node.target, "default", node.target)
        if isinstance(target, torch._ops.OpOverload) and dispatch.serves(target):
            return f"{target} has a kernel of the program's for the accelerator"
    drawn = _devices(node for node in nodes if _draws(node.target))
    if len(drawn) > 1:
        return f"it draws random numbers on {' and '.join(sorted(map(str, drawn)))}"
    return _missing_compiler()


@functools.cache
def _missing_compiler() -> str:
    builder = importlib.import_module("torch._inductor.cpp_builder")
    try:
        builder.get_cpp_compiler()
    except Exception as error:
        return f"there is no C++ compiler ({type(error).__name__})"
    return ""


@lets_handlers_run
def compile_graph(
    compile_one: Compiled, gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
) -> Any:
    """Compile an ATen graph, forward or backward. The result takes a list of device tensors."""
    nodes = list(_nodes(gm))
    if not any(each.type == DEVICE_TYPE for each in _devices(nodes)):
        return compile_one(gm, inputs, **options)
    _check_capability(gm, nodes, inputs)
    graph = overwritten_outputs.graph_of(gm, nodes, options)
    examples = [_example(each) for each in inputs]
    compiled = compile_one(_for_cpu(gm, examples), examples, **options)
    if importlib.import_module("torch._inductor.virtualized").V.aot_compilation:
        return compiled  # a file
    (outputs,) = gm.graph.output_node().args
    indices = [_index(getattr(each, "meta", {}).get("val")) for each in outputs]  # type: ignore[union-attr]
    own = (name.replace("::", ".") for name in torch._library.custom_ops.OPDEFS)
    calls = ("c10d", "triton_kernel", "auto_functionalized", *own)
    takes_host_tensors = any(name in str(node.target) for node in nodes for name in calls)
    drawn = next(iter(_devices(node for node in nodes if _draws(node.target))), _CPU)

    def compute(given: list[Any]) -> Any:
        asking = policy.asking()
        if asking is not None and asking.observers():  # it looks at each operator
            return gm(*given)
        with (
            having(thread, calls=thread.calls + 1)
            if takes_host_tensors
            else contextlib.nullcontext()
        ):
            results = _Aliases(compiled, indices, drawn).call((given,), {})
        given.clear()  # as callers of such a function expect
        return results

    @without_mode
    def run(given: list[Any]) -> Any:
        return overwritten_outputs.run(graph, compute, given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


thread = PerThread(calls=0)
"""How many calls have not returned of compiled code whose process groups, Triton kernels and custom
operators take CPU tensors.
"""


_FLOAT8 = torch.float8_e4m3fn

_NO_FLOAT8 = (
    "type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', "
    "'fp8e5')"
)


def _check_capability(
    gm: torch.fx.GraphModule, nodes: Iterable[torch.fx.Node], inputs: Sequence[Any]
) -> None:
    """Raise Inductor's and Triton's errors for a GPU's capability.

    Raises:
        SkipFrame: The graph takes or returns bfloat16, which the GPU has no instructions for.
            Dynamo then runs the function operator by operator (``torch/_inductor/compile_fx.py:
            _check_triton_bf16_support``).
        InductorError: The graph casts from or to float8_e4m3fn (``triton/language/core.py:
            to_ir``).
    """
    context = thread_state.answering()
    if context is None or not context.runtime.profile.stands_for_cuda:  # type: ignore[attr-defined]
        return
    (outputs,) = gm.graph.output_node().args
    given: list[Any] = [*inputs, *(getattr(each, "meta", {}).get("val") for each in outputs)]  # type: ignore[union-attr]
    halves = [each for each in given if _index(each) >= 0 and each.dtype is torch.bfloat16]
    if halves and context.devices.figure("capability", _index(halves[0])) < (8, 0):
        name = device_queries.properties_of(context, _index(halves[0])).name
        warnings.warn(
            f"{name} does not support bfloat16 compilation natively, skipping", stacklevel=2
        )
        raise importlib.import_module("torch._dynamo.exc").SkipFrame("BF16 is not supported")
    # A graph with a cast is refused where one of its devices lacks the dtype.
    indices = {_index(each) for each in given} - {-1} or {context.thread.device_index}
    least = min(context.devices.figure("capability", index) for index in indices)
    if least < (8, 9) and any(map(_casts_float8, nodes)):
        error = importlib.import_module("torch._inductor.exc").InductorError
        raise error(ValueError(_NO_FLOAT8), None)


def _casts_float8(node: torch.fx.Node) -> bool:
    """Return whether Triton code of a device graph's node would read or write float8_e4m3fn."""
    values: list[Any] = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    dtypes = {each.dtype for each in values if _index(each) >= 0}
    return (
        node.op == "call_function"
        and _FLOAT8 in dtypes
        and len(dtypes) > 1
        and "_scaled_mm" not in str(node.target)
    )


class _Aliases(CpuAliases):
    """The same for a compiled graph, each of whose results is on a device of its own."""

    def __init__(self, compiled: Compiled, indices: list[int], drawn: torch.device):
        super().__init__(
            compiled, None, device_generators.from_default if drawn.type == DEVICE_TYPE else None
        )
        self._indices, self._named = indices, drawn.index or 0

    def returned(self, result: Any) -> Any:
        given = {id(own): value for value, own in reversed(self.pairs.values())}
        returned = []
        for each, index in zip(result, self._indices, strict=True):
            if id(each) in given:
                returned.append(given[id(each)])
            else:
                returned.append(each if index < 0 else wrapped(each, index))
        return returned


def _nodes(gm: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a graph and of the graphs in it."""
    for module in gm.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


def _devices(nodes: Iterable[torch.fx.Node]) -> set[torch.device]:
    values = (node.meta.get("example_value", node.meta.get("val")) for node in nodes)
    return {
        each.device for each in pytree.tree_leaves(list(values)) if isinstance(each, torch.Tensor)
    }


def _index(value: Any) -> int:
    """Return the index of the device that a tensor is on; -1 for the CPU and other objects."""
    if isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE:
        return value.device.index or 0
    return -1


def _draws(target: Any) -> bool:
    is_seeded = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return is_seeded or "inductor_seed" in str(target)


def _example(value: Any) -> Any:
    """Return the compiler's CPU tensor with shape, strides and dtype of a device's example."""
    if _index(value) < 0:
        return value
    with _fake_mode(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CPU)


def _fake_mode(*values: Any) -> Any:
    return importlib.import_module("torch._guards").detect_fake_mode(values)


def _for_cpu(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
    """Return a graph's copy whose devices, constants, examples and inner graphs are the CPU's."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        copied = copies[node] = graph.node_copy(node, copies.__getitem__)
        copied.args, copied.kwargs = CpuAliases(None).take((copied.args, copied.kwargs))
        is_flex = node.target is torch.ops.higher_order.flex_attention
        if is_flex and all(user.args[1] == 0 for user in node.users):
            # torch clears this flag itself where tensors are on the CPU, whose code returns no
            # logarithms of sums.
            arguments: Any = copied.args
            *given, flags, score_buffers, mask_buffers = arguments
            copied.args = (
                *given,
                {**flags, "OUTPUT_LOGSUMEXP": False},
                score_buffers,
                mask_buffers,
            )
        if node.target in _MOVES and _devices([node]) != _devices(node.all_input_nodes):
            # On one device it would be no copy: writes to one tensor would reach the other.
            with graph.inserting_before(copied):
                copied.args = (
                    graph.call_function(torch.ops.aten.clone.default, copied.args[:1]),
                    *copied.args[1:],
                )
    result = torch.fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    for node in graph.find_nodes(op="get_attr"):
        path, _, name = node.target.rpartition(".")
        owner = result.get_submodule(path)
        value = getattr(owner, name)
        if isinstance(value, torch.fx.GraphModule):
            inner = [
                _example(each.meta["val"]) for each in value.graph.find_nodes(op="placeholder")
            ]
            owner.add_module(name, _for_cpu(value, inner))
        elif isinstance(value, torch.nn.Parameter):
            owner.register_parameter(
                name, torch.nn.Parameter(CpuAliases(None).take(value.detach()), False)
            )
        else:
            setattr(owner, name, CpuAliases(None).take(value))
    propagation = importlib.import_module("torch.fx.passes.fake_tensor_prop")
    propagation.FakeTensorProp(result, _fake_mode(*examples)).propagate_dont_convert_inputs(
        *examples
    )
    return result


_MOVES = {torch.ops.aten._to_copy.default, torch.ops.prims.device_put.default}
