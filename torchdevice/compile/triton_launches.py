"""Launches of Triton kernels in compiled code: operators among the code that Inductor makes for the CPU.

Dynamo puts a launch into its graph, as it does on CUDA, and Inductor orders it by what the kernel reads and writes.
Only the code of the launch is another one: Inductor compiles the kernel for a GPU, here torch's own operator calls it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from torchdevice.compile.torch_compile import for_compiler
from torchdevice.core import Context, Patch, later, replaces

_LAUNCH = "triton_kernel_wrapper_mutation"


@replaces("torch._dynamo.variables.builder:VariableBuilder", "_wrap")
def _wrap(context: Context, original: Any, self: Any, value: Any) -> Any:
    """Trace a kernel. Dynamo asks ``has_triton()`` whether it is one, which is false for a compiler."""
    triton = sys.modules.get("triton")
    if triton is None or not isinstance(value, (triton.runtime.JITFunction, triton.runtime.Autotuner)):
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
    if context.runtime.makes_triton_code:
        original(self, wrapper)
        return
    of_node = self.fx_node.kwargs
    shown = {name: wrapper.val_to_arg_str(self.get_kwargs_value(name)) for name in of_node["kwargs"]}
    arguments = ", ".join(f"{name!r}: {value}" for name, value in shown.items())
    wrapper.writeline(
        f"torch.ops.higher_order.{_LAUNCH}(kernel_idx={of_node['kernel_idx']}, "
        f"constant_args_idx={of_node['constant_args_idx']}, grid={wrapper.val_to_arg_str(self.grid)}, "
        f"tma_descriptor_metadata={{}}, kwargs={{{arguments}}})"
    )


def _cacheable(context: Context, original: Any, self: Any) -> bool:
    """Keep the code out of the caches on disk: it has numbers of torch's table of kernels, which is the process's."""
    return original(self) and "triton_kernel" not in self.name()
