"""Compiles graphs of the simulated device by Inductor: as C++ for the CPU tensors that have the memory of the device's.

Torch divides a graph into forward and backward on the device. Inductor then compiles each for the CPU, and what it
returns is called with CPU tensors.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchdevice.core import thread_state
from torchdevice.foundation import torch_internals
from torchdevice.simulation import device_generators, policy
from torchdevice.simulation.kernels.cpu_kernels import CpuAliases, without_mode
from torchdevice.simulation.policy import DEVICE_TYPE
from torchdevice.torch_apis import library

_CPU = torch.device("cpu")

Compiled = Callable[..., Any]


def obstacle(gm: torch.fx.GraphModule) -> str:
    """Return why a graph of Dynamo's cannot be compiled for the device; "" where it can."""
    if any(isinstance(each, torch.fx.GraphModule) for each in gm.modules() if each is not gm):
        return "the graph contains another one"
    for node in gm.graph.nodes:
        target = getattr(node.target, "default", node.target)
        if isinstance(target, torch._ops.OpOverload) and library.serves(target):
            return f"{target} has a kernel of the program's for the accelerator"
    devices = {each.device for each in _tensors(gm) if each.device.type == DEVICE_TYPE or each.dim()}
    if len(devices) > 1 or any(each.type != DEVICE_TYPE for each in devices):
        return f"its tensors are on {' and '.join(sorted(map(str, devices)))}"
    return _missing_compiler()


@functools.cache
def _missing_compiler() -> str:
    builder = importlib.import_module("torch._inductor.cpp_builder")
    try:
        builder.get_cpp_compiler()
    except Exception as error:
        return f"there is no C++ compiler ({type(error).__name__})"
    return ""


def compile_graph(options: dict[str, Any], gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Compile a graph of Dynamo's, as the backend "inductor" of ``torch.compile`` does.

    Args:
        options: Inductor's options.
        gm: The graph, for which :func:`obstacle` finds nothing.
        inputs: Its example inputs.
    """
    fx = importlib.import_module("torch._inductor.compile_fx")
    torch_internals.check("later", "torch._functorch.config")
    with torch._functorch.config.patch(enable_autograd_cache=False):  # it stores Inductor's own results only
        compiled: Compiled = fx.compile_fx(gm, inputs, inner_compile=_compile_one, config_patches=options)
    return compiled


def _compile_one(gm: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Compiled:
    """Compile a graph of ATen operators, forward or backward. The result takes a list of the device's tensors."""
    fx = importlib.import_module("torch._inductor.compile_fx")
    # A backward graph may be compiled where it first runs, in the scope.
    with thread_state.suspended(compiling=True):
        index = next((each.device.index or 0 for each in _tensors(gm) if each.device.type == DEVICE_TYPE), 0)
        draws = any(_draws(node.target) for node in gm.graph.nodes)
        examples = [_example(each) for each in inputs]
        compiled = fx.compile_fx_inner(_for_cpu(gm, examples), examples, **options)

    @without_mode
    def run(given: list[Any]) -> Any:
        asking = policy.asking()
        if asking is not None and asking.recorder():  # it looks at each operator
            return gm(*given)
        aliases = CpuAliases(compiled, None, device_generators.from_default if draws else None)
        aliases.indices.add(index)
        results = aliases.call((given,), {})
        given.clear()  # as callers of such a function expect
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _tensors(gm: torch.fx.GraphModule) -> Iterator[torch.Tensor]:
    for node in gm.graph.nodes:
        for each in pytree.tree_leaves(node.meta.get("example_value", node.meta.get("val"))):
            if isinstance(each, torch.Tensor):
                yield each


def _draws(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or "inductor_seed" in str(target)


def _example(value: Any) -> Any:
    """Return a CPU tensor of the compiler's with the shape, strides and dtype of an example of the device."""
    if not isinstance(value, torch.Tensor) or value.device.type != DEVICE_TYPE:
        return value
    with _fake_mode(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CPU)


def _fake_mode(*values: Any) -> Any:
    return importlib.import_module("torch._guards").detect_fake_mode(values)


def _for_cpu(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
    """Return a copy of a graph whose devices, constants and example values are the CPU's."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        copied = copies[node] = graph.node_copy(node, copies.__getitem__)
        copied.args, copied.kwargs = pytree.tree_map(_on_cpu, (copied.args, copied.kwargs))
    result = torch.fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    for node in graph.find_nodes(op="get_attr"):
        setattr(result, node.target, CpuAliases(None).take(getattr(result, node.target)))
    propagation = importlib.import_module("torch.fx.passes.fake_tensor_prop")
    propagation.FakeTensorProp(result, _fake_mode(*examples)).propagate_dont_convert_inputs(*examples)
    return result


def _on_cpu(value: Any) -> Any:
    return _CPU if isinstance(value, torch.device) and value.type == DEVICE_TYPE else value
