"""``context_parallel``: attention over sequences that are divided among ranks. For ``torch/distributed/tensor``.

torch passes keys and values around a ring of ranks, each of which computes attention with its queries. It does so for
the attention kernels of CUDA, by a table of operators. Here the CPU's kernel is in the table too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.context import Context
from torchdevice.importing import WhenImported
from torchdevice.patching import Patch, replaced_function
from torchdevice.torch_internals import require

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"

_SEQUENCE = 2
"""The dimension of a sequence in queries of shape (batch, heads, sequence, features)."""

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def is_divided(*tensors: Any) -> bool:
    """Return whether attention of these tensors goes around a ring: ``context_parallel`` is on, and divides them."""
    module = sys.modules.get(_MODULE)
    return (
        module is not None
        and all(isinstance(each, module.DTensor) for each in tensors)
        and _FORWARD in module.DTensor._op_dispatcher._custom_op_handlers
    )


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Attention of this rank's queries with the keys and values of all ranks.

    Args:
        op: The operator, whose arguments and results these are.
        args: Query, key, value, and the arguments ``dropout_p`` and ``is_causal``.
        kwargs: ``attn_mask`` and ``scale``.

    Raises:
        NotImplementedError: There is a mask, which torch does not divide.
    """
    if kwargs.get("attn_mask") is not None:
        raise NotImplementedError("context_parallel does not divide attn_mask. Use is_causal, or no mask.")
    names = ("query", "key", "value", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given.pop("attn_mask", None)
    return _around_ring("_templated_ring_attention", op._overloadpacket, given)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The gradients of :func:`_forward` for query, key and value."""
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs, "grad_out_name": "grad_out"}
    given.pop("attn_mask", None)
    return _around_ring("_templated_ring_attention_backward", op, given)


def _around_ring(template: str, op: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    """Call torch's template of ring attention with the parts of this rank. The results are divided as the query is."""
    module = sys.modules[_MODULE]
    spec = given["query"]._spec
    parts = {name: each._local_tensor if isinstance(each, module.DTensor) else each for name, each in given.items()}
    results = require(module, template)(spec.mesh.get_group(), _SEQUENCE, op, **parts)
    # Not from_local(), which moves tensors to the device of the mesh: modes are off here, and it says cuda.
    return tuple(module.DTensor(each, _spec_of_whole(each, spec), requires_grad=False) for each in results)


def _spec_of_whole(part: torch.Tensor, spec: Any) -> Any:
    """Return what describes a distributed tensor of such parts, which are divided as ``spec`` says."""
    size, step = spec.mesh.size(), part.stride(_SEQUENCE)
    shape = [each * size if dim == _SEQUENCE else each for dim, each in enumerate(part.shape)]
    stride = [each * size if each > step else each for each in part.stride()]
    meta = type(spec.tensor_meta)(torch.Size(shape), tuple(stride), part.dtype)
    return type(spec)(spec.mesh, spec.placements, tensor_meta=meta)


_HANDLERS: dict[Any, Callable[..., tuple[Any, ...]]] = {_FORWARD: _forward, _BACKWARD: _backward}


def _enable(context: Context, original: Any) -> None:
    """``_enable_cp_dtensor_dispatcher``: add to the table, which torch has just made and drops when it is done."""
    original()
    dispatcher = sys.modules[_MODULE].DTensor._op_dispatcher
    dispatcher._custom_op_handlers = {**dispatcher._custom_op_handlers, **_HANDLERS}


def _patches_of(module: ModuleType) -> list[Patch]:
    return [replaced_function(module, "_enable_cp_dtensor_dispatcher", _enable, native_to="cuda")]


def patches() -> list[Patch]:
    """Return the patch of the module; none in a build without ``torch.distributed``."""
    return [WhenImported(_MODULE, _patches_of)] if dist.is_available() else []
