"""Sparse COO tensors of the device: torch's own sparse tensors, whose indices and values are on the device.

Operators that only take or return indices and values run on the tensor itself; the others run on a sparse CPU tensor
that shares the memory. There are no compressed layouts (CSR, CSC, BSR, BSC), because torch makes no such tensor for an
out-of-tree backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils import _pytree as pytree

from torchdevice.simulation.allocator import fresh, meaning, with_bits
from torchdevice.simulation.kernels import aliased, fresh_sparse, index_of, without_mode
from torchdevice.simulation.relabel import on_cpu
from torchdevice.torch_internals import registrations_for_dispatch_key

_aten = torch.ops.aten


_CPU = torch.device("cpu")


_OF_PARTS = (
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_coo_tensor_with_dims",
    "_indices",
    "_values",
    "indices",
    "values",
    "_nnz",
    "sparse_dim",
    "dense_dim",
    "_dimI",
    "_dimV",
    "is_coalesced",
    "_coalesced_",
    "sparse_resize_",
    "sparse_resize_and_clear_",
)
"""Operators that make sparse tensors from indices and values, or return these, and read no memory."""


_RUN_WHOLE = {"clone", "copy_", "_to_copy", "zero_", "empty_like"}


def register() -> list[torch.library.Library]:
    """Register the kernels with torch. Return the libraries, which unregister their kernels when they end."""
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(without_mode(_run), "SparsePrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in _OF_PARTS:
        aten.impl(name, without_mode(_of_parts(getattr(_aten, name).default)), "SparsePrivateUse1")
    of_cpu = registrations_for_dispatch_key("SparseCPU")
    shadowed = set(registrations_for_dispatch_key("CompositeExplicitAutograd")).intersection(of_cpu)
    names = {name.removeprefix("aten::") for name in shadowed if name.startswith("aten::")} | _RUN_WHOLE
    for name in sorted(names.difference(_OF_PARTS)):
        base, _, overload = name.partition(".")
        op = getattr(getattr(_aten, base), overload or "default")
        aten.impl(name, without_mode(functools.partial(_run, op)), "SparsePrivateUse1")
    return [fallback, aten]


def _of_parts(op: Any) -> Callable[..., Any]:
    run = functools.partial(op._op_dk, DispatchKey.SparseCPU)
    if not any(argument.name == "device" for argument in op._schema.arguments):
        return run

    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or device.index is None:
            return run(*args, device=device, **kwargs)
        with meaning(device.index):
            return run(*args, device=device, **kwargs)

    return make


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on CPU tensors that share the memory, and update the sparse tensors that it wrote to."""
    leaves = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    index = max((index_of(each) for each in leaves), default=-1)
    device = kwargs.get("device")
    if device is not None:
        index = -1 if device.type == "cpu" else device.index or 0
        kwargs = {**kwargs, "device": _CPU}
    on_cpu = pytree.tree_map_only(torch.Tensor, _alias, (args, kwargs))
    result = op(*on_cpu[0], **on_cpu[1])
    given = dict(zip(map(id, pytree.tree_leaves(on_cpu)), pytree.tree_leaves((args, kwargs)), strict=True))
    written = {a.name: i for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write}
    for name, position in written.items():
        target = kwargs.get(name) if name in kwargs else args[position]
        if isinstance(target, torch.Tensor) and target.is_sparse:
            _replace(target, _alias_of(target, on_cpu, name, position), index)
    return pytree.tree_map_only(torch.Tensor, lambda each: _wrapped(each, given, index), result)


def _alias_of(target: torch.Tensor, on_cpu: Any, name: str, position: int) -> torch.Tensor:
    return on_cpu[1][name] if name in on_cpu[1] else on_cpu[0][position]


def _wrapped(result: torch.Tensor, given: dict[int, Any], index: int) -> torch.Tensor:
    if id(result) in given:
        return given[id(result)]
    if index < 0:
        return result
    return fresh_sparse(result, index) if result.is_sparse else fresh(result, index)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if index_of(tensor) < 0:
        return tensor
    if not tensor.is_sparse:
        return aliased(tensor)
    parts = _parts(tensor)  # imported by DLPack below, so that an in-place operator cannot resize them
    return _aten._sparse_coo_tensor_unsafe(
        *(with_bits(on_cpu(part), part) for part in parts), tensor.shape, is_coalesced=_is_coalesced(tensor)
    )


_indices, _values = _of_parts(_aten._indices.default), _of_parts(_aten._values.default)


_is_coalesced = _of_parts(_aten.is_coalesced.default)


_take_parts = _of_parts(_aten.copy_sparse_to_sparse_.default)


_set_coalesced = _of_parts(_aten._coalesced_.default)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _indices(tensor), _values(tensor)


def _replace(target: torch.Tensor, own: torch.Tensor, index: int) -> None:
    """Give ``target``, a sparse tensor that was written to, the indices and values of ``own``, its CPU tensor."""
    _take_parts(target, fresh_sparse(own, index))
    _set_coalesced(target, own.is_coalesced())
