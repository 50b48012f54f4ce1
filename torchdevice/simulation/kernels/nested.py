"""Nested tensors of the device with the strided layout: torch's own, whose values are one buffer on the device.

Views, and copies between devices, run torch's kernel for the CPU on the nested tensor itself: it calls operators on the
buffer. The other operators run on a nested CPU tensor that shares the memory. The jagged layout needs nothing: it is a
subclass in Python, of plain tensors.
"""

from __future__ import annotations

import functools

import torch
from torch._C import DispatchKey

from torchdevice.fallback.fallback_kernels import of_aten, overload_of
from torchdevice.foundation import data_files
from torchdevice.foundation.torch_internals import registrations_for_dispatch_key
from torchdevice.simulation.kernels.cpu_kernels import CpuAliases, aliased, without_mode
from torchdevice.simulation.kernels.pipeline import aliasing

_OPERATORS = data_files.read(__file__, "operators.json")

_ON_ITSELF = frozenset(_OPERATORS["of a nested tensor itself"].split())
"""Operators whose kernel for the CPU reads no memory, or calls another operator that does."""

MAKING = _OPERATORS["making nested tensors"].split()
"""Operators on plain tensors that give nested ones, or call such operators."""


def register(aten: torch.library.Library) -> None:
    """Register the kernels with torch."""
    for name in sorted(of_aten(registrations_for_dispatch_key("NestedTensorCPU"))):
        op = overload_of(name)
        on_itself = without_mode(functools.partial(op._op_dk, DispatchKey.NestedTensorCPU))
        kernel = on_itself if name in _ON_ITSELF else aliasing(_NestedAliases, op)
        aten.impl(name, kernel, "NestedTensorPrivateUse1")
    for name in MAKING:
        aten.impl(name, aliasing(_NestedAliases, overload_of(name)), "PrivateUse1")


class _NestedAliases(CpuAliases):
    """CPU tensors in the memory of a call's tensors, nested or not."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return _of_buffer(aliased(_buffer(tensor)), tensor) if tensor.is_nested else aliased(tensor)

    def back(self, result: torch.Tensor) -> torch.Tensor:
        return _of_buffer(super().back(_buffer(result)), result) if result.is_nested else super().back(result)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a nested tensor as a plain tensor of one dimension."""
    if not tensor.size(0):
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return tensor[0].as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _of_buffer(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor of a buffer, with the sizes, strides and offsets of another."""
    parts = like._nested_tensor_size(), like._nested_tensor_strides(), like._nested_tensor_storage_offsets()
    return torch.ops.aten._nested_view_from_buffer(buffer, *parts)
