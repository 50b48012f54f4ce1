"""Attention of distributed tensors, by the CPU's flash kernel. For ``torch/distributed/tensor``.

torch knows how the work of CUDA's kernels for attention is divided, but not that of the CPU's.
Where each rank has some sequences or some heads, it computes attention with these. Under
``context_parallel`` each rank has a part of every sequence: torch's own code passes keys and values
around the ring of ranks, here for the CPU's kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import later, replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import Added, Patch
from torchdevice.kernel.stand_ins import given_to

_API = "torch.distributed.tensor._api"

_RING = "torch.distributed.tensor.experimental._context_parallel._attention"

_SEQUENCE = 2
"""The dimension of a sequence in queries of shape (batch, heads, sequence, features)."""

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_OPERATORS = (_FORWARD, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)


def is_divided(*tensors: Any) -> bool:
    """Return whether attention on this query, key and value is divided among ranks here."""
    # Without the module there are no distributed tensors; asking must not import it.
    api = sys.modules.get(_API)
    if api is None or not all(isinstance(each, api.DTensor) for each in tensors):
        return False
    handlers = api.DTensor._op_dispatcher._custom_op_handlers
    return handlers.get(_FORWARD) is _around_ring or _are_apart(tensors)


def _are_apart(tensors: Sequence[Any]) -> bool:
    """Return whether each rank has what it needs: whole sequences, of some batches and heads."""
    placements = tensors[0].placements
    # Dimension 0 is the batch, 1 the heads; both can be computed apart.
    whole = all(each.is_replicate() or each.is_shard(0) or each.is_shard(1) for each in placements)
    return whole and all(each.placements == placements for each in tensors)


def _in_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute with the parts of this rank."""
    given = given_to(op, args, kwargs)
    inputs = [given[name] for name in ("query", "key", "value")]
    # Outside a scope torch's own error stands.
    if (
        thread_state.state.context is None
        or given.get("attn_mask") is not None
        or not _are_apart(inputs)
    ):
        # Torch's words.
        raise NotImplementedError(f"Operator {op} does not have a sharding strategy registered.")
    return _whole(op, given, op(**_parts(given)))


def _around_ring(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute by torch's template of ring attention, with the parts of this rank."""
    given = given_to(op, args, kwargs)
    if given.pop("attn_mask", None) is not None:
        raise NotImplementedError(
            "context_parallel does not divide attn_mask. Use is_causal, or no mask."
        )
    group, ring = given["query"].device_mesh.get_group(), sys.modules[_RING]
    if op is _FORWARD:
        # Torch's template calls the overload packet in forward, and the overload in backward.
        template, call = ring._templated_ring_attention, op._overloadpacket
        named = _parts(given)
    else:
        template, call = ring._templated_ring_attention_backward, op
        named = {**_parts(given), "grad_out_name": "grad_out"}
    return _whole(op, given, template(group, _SEQUENCE, call, **named))


def _parts(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with this rank's part instead of each distributed tensor."""
    placements = given["query"].placements
    found = dict(given)
    for name, value in given.items():
        if hasattr(value, "placements"):
            if value.placements == placements:
                alike = value
            else:
                alike = value.redistribute(placements=placements)
            found[name] = alike._local_tensor
    return found


def _whole(op: Any, given: dict[str, Any], results: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return distributed tensors of results, which are divided as the query is."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    rows = query.shape[:-1]
    # The results of forward are the output and the logsumexp; of backward the three gradients.
    if op is _FORWARD:
        shapes = [(*rows, value.shape[-1]), rows]
    else:
        shapes = [query.shape, key.shape, value.shape]
    # Not from_local(), which moves tensors to the mesh's device: it is cuda, and modes are off.
    kind, spec = type(query), query._spec
    found = []
    for part, shape in zip(results, shapes, strict=False):
        found.append(kind(part, _spec(part, shape, spec), requires_grad=False))
    return tuple(found)


def _spec(part: torch.Tensor, shape: Sequence[int], spec: Any) -> Any:
    """Return the spec of a distributed tensor of that shape, laid out in memory as its part."""
    by_stride = sorted(range(len(shape)), key=part.stride, reverse=True)
    whole = torch.empty_permuted(shape, by_stride, device="meta")
    meta = type(spec.tensor_meta)(whole.shape, whole.stride(), part.dtype)
    return type(spec)(spec.mesh, spec.placements, tensor_meta=meta)


@replaces(_RING, "_enable_cp_dtensor_dispatcher", native_to="cuda")
def _enable_ring(context: Context, original: Any) -> None:
    """``_enable_cp_dtensor_dispatcher``: add to the table that torch makes, and later drops."""
    original()
    dispatcher = sys.modules[_RING].DTensor._op_dispatcher
    # A new dictionary: the table that torch puts back must not have the entries.
    dispatcher._custom_op_handlers = {
        **dispatcher._custom_op_handlers,
        **dict.fromkeys(_OPERATORS, _around_ring),
    }


@later(_API)
def _patches_of_tensors(module: Any) -> list[Patch]:
    return [
        Added(
            module.DTensor._op_dispatcher._custom_op_handlers, dict.fromkeys(_OPERATORS, _in_parts)
        )
    ]
