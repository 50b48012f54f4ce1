"""Nested tensors of the device with the strided layout: torch's own, whose values are one buffer on the device.

Views, and copies between devices, run torch's kernel for the CPU on the nested tensor itself: it calls operators on the
buffer. The other operators run on a nested CPU tensor that shares the memory. The jagged layout needs nothing: it is a
subclass in Python, of plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils import _pytree as pytree

from torchdevice.foundation.torch_internals import registrations_for_dispatch_key
from torchdevice.simulation import device_generators as device_random
from torchdevice.simulation import policy
from torchdevice.simulation.allocator.storages import fresh
from torchdevice.simulation.kernels import device_mismatch
from torchdevice.simulation.kernels.cpu_kernels import aliased, index_of, without_mode
from torchdevice.simulation.kernels.overloads import of_aten, overload_of

_aten = torch.ops.aten

_KEY = "NestedTensorPrivateUse1"

_CPU = torch.device("cpu")

_ON_ITSELF = (
    *("_nested_tensor_size", "_nested_tensor_strides", "_nested_tensor_storage_offsets", "is_pinned", "is_same_size"),
    *("alias", "detach", "values", "view", "unbind.int", "select.int", "narrow", "chunk", "split_with_sizes"),
    *("transpose.int", "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze"),
    *("_to_copy", "copy_", "clone", "empty_like"),
)
"""Operators whose kernel for the CPU reads no memory, or calls another operator that does."""

MAKING = (
    "_nested_from_padded",
    "_nested_tensor_from_mask",
    "_nested_tensor_from_mask_left_aligned",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
)
"""Operators on plain tensors that give nested ones, or call such operators."""


_TAKING_SIZES = (_aten._nested_from_padded.default,)
"""Operators with an argument that is on the CPU: the sizes of nested tensors always are."""


def register(aten: torch.library.Library) -> None:
    """Register the kernels with torch."""
    for name in sorted(of_aten(registrations_for_dispatch_key("NestedTensorCPU"))):
        op = overload_of(name)
        run = functools.partial(op._op_dk, DispatchKey.NestedTensorCPU) if name in _ON_ITSELF else _kernel(op)
        aten.impl(name, without_mode(run), _KEY)
    for name in MAKING:
        aten.impl(name, without_mode(_kernel(overload_of(name))), "PrivateUse1")


def _kernel(op: Any) -> Callable[..., Any]:
    """Return a kernel that runs an operator on CPU tensors, through the active recorders, if any."""
    run = functools.partial(_run_on_cpu, op, device_random.kind_of(op))
    return lambda *args, **kwargs: policy.looked_at(op, run, args, kwargs)


def _run_on_cpu(op: Any, random: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    if op not in _TAKING_SIZES:
        device_mismatch.check(op, args, kwargs)
    index = max(map(index_of, leaves))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": _CPU}
    aliases = {id(each): _alias(each) for each in leaves}
    given = {id(aliases[id(each)]): each for each in leaves}
    taken, named = pytree.tree_map_only(torch.Tensor, lambda each: aliases[id(each)], (args, kwargs))
    result = op(*taken, **named) if random is None else random(op, index, list(taken), named)
    return pytree.tree_map_only(torch.Tensor, lambda each: given.get(id(each), _wrapped(each, index)), result)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that shares memory with a tensor of the device, nested or not."""
    if index_of(tensor) < 0:
        return tensor
    return _of_buffer(aliased(_buffer(tensor)), tensor) if tensor.is_nested else aliased(tensor)


def _wrapped(result: torch.Tensor, index: int) -> torch.Tensor:
    return _of_buffer(fresh(_buffer(result), index), result) if result.is_nested else fresh(result, index)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a nested tensor as a plain tensor of one dimension."""
    if not tensor.size(0):
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return tensor[0].as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _of_buffer(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a nested tensor of a buffer, with the sizes, strides and offsets of another."""
    parts = like._nested_tensor_size(), like._nested_tensor_strides(), like._nested_tensor_storage_offsets()
    return _aten._nested_view_from_buffer(buffer, *parts)
