"""Functions on the memory of tensors, each run as one torch operator with a kernel for the CPU.

A simulated device, a recorder of races, a capture of a graph and the fallback of MPS treat
``torchdevice_host::call`` as any other operator that the target runs by a kernel of the CPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from torchdevice.kernel import registered_kernels
from torchdevice.kernel.context import Context
from torchdevice.kernel.python.interrupt_safe_exit import block
from torchdevice.kernel.torch_internals import ExcludeDispatchKeyGuard

Function = Callable[[list[torch.Tensor]], None]
"""Reads and writes CPU tensors."""

# The key that counts versions of tensors.
_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

_numbers = itertools.count()
_functions: dict[int, Function] = {}
"""The functions that are being called, and those of captured graphs, by the number that the
operator gets.
"""


@functools.cache
def _register() -> None:
    """Define the operator, once in a process."""
    registered_kernels.define("torchdevice_host", "call(Tensor(a!)[] memory, int number) -> ()")
    name = "torchdevice_host::call"
    registered_kernels.put(name, lambda memory, number: _functions[number](memory), "CPU", __file__)
    registered_kernels.put(name, lambda memory, number: None, "Meta", __file__)


def call(context: Context, function: Function, memory: list[torch.Tensor]) -> None:
    """Call a function with CPU tensors that have the memory of tensors of the target."""
    _register()
    if not memory:
        function(memory)  # torch's dispatcher finds no device
        return
    number = next(_numbers)
    _functions[number] = function
    try:
        with as_kernels_do():
            torch.ops.torchdevice_host.call.default(memory, number)
    finally:
        # A graph that was captured calls it again.
        if context.thread.capture is None:
            del _functions[number]


@block
def as_kernels_do() -> Iterator[None]:
    """Write to tensors unseen by autograd and the version counter, as kernels of a GPU do."""
    below_autograd = torch._C._AutoDispatchBelowAutograd()
    no_versions = ExcludeDispatchKeyGuard(_VERSIONS)
    with torch._C.DisableTorchFunction(), torch.no_grad(), below_autograd, no_versions:
        yield
