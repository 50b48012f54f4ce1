"""Recurrent networks as cuDNN computes them: weights in one piece, derivatives in training mode only, and once.

cuDNN computes a network where ``torch.backends.cudnn.flags(enabled=False)`` does not forbid it. Its backward is one
operator (aten/src/ATen/native/cudnn/RNN.cpp), which checks the mode and has no derivative. Here torch composes the
network of cells, and a node of autograd around the network's inputs refuses what that operator refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.foundation.stand_ins import mapped, tensors
from torchdevice.foundation.torch_texts import text
from torchdevice.journal.callers import program_line, warn_at
from torchdevice.simulation import policy

OPERATORS = tuple(f"{name}.{kind}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("input", "data"))

_DTYPES = (torch.float16, torch.float32, torch.float64)


def is_on_cudnn(input: torch.Tensor) -> bool:
    """Return whether cuDNN computes a network with this input, as ``at::cudnn_is_acceptable`` decides."""
    return bool(torch._C._get_cudnn_enabled() and input.dtype in _DTYPES and input.numel() and not input.is_cpu)


class _Backward(torch.autograd.Function):
    """Refuses the gradients of a network in evaluation mode, and those of gradients, for which ``train`` is None."""

    @staticmethod
    def forward(ctx: Any, train: bool | None, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.train = train
        return tuple(each.view_as(each) for each in given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.train is None:
            raise NotImplementedError(text("cuDNN's networks twice"))
        if not ctx.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        return None, *(_Backward.apply(None, *gradients) if torch.is_grad_enabled() else gradients)


def kernel_of(op: Any) -> Callable[..., Any]:
    """Return the kernel of a network above autograd."""
    names = [argument.name for argument in op._schema.arguments]
    train, weights = names.index("train"), names.index("params")

    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            if _are_in_pieces(args[0], args[weights]):
                warn_at(program_line(), UserWarning(text("cuDNN's weights in pieces")), UserWarning)
            return op.decompose(*(_watched(args, args[train]) if torch.is_grad_enabled() else args))

    return run


def _watched(args: Any, train: bool) -> Any:
    if not (is_on_cudnn(args[0]) and policy.stands_for_cuda()):
        return args
    given = {id(each): each for each in tensors(list(args)) if each.requires_grad}
    watched = dict(zip(given, _Backward.apply(train, *given.values()) if given else (), strict=True))
    return mapped(args, lambda each: watched.get(id(each), each))


def _in_order(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return weights as cuDNN orders them in memory: the matrices of all layers, then the biases."""
    return sorted(weights, key=lambda each: -each.dim())


def flatten(weights: list[torch.Tensor], *rest: Any) -> torch.Tensor:
    """Move weights to one piece of memory: the kernel of ``_cudnn_rnn_flatten_weight``."""
    ordered = _in_order(weights)
    flat = weights[0].new_empty(sum(each.numel() for each in ordered))
    for weight, part in zip(ordered, flat.split([each.numel() for each in ordered]), strict=True):
        weight.set_(part.view_as(weight).copy_(weight))
    return flat


def _are_in_pieces(input: torch.Tensor, weights: list[torch.Tensor]) -> bool:
    """Return whether cuDNN would have to copy weights. Autocast does that for it, and tracers' have no memory."""
    real = all(type(each) is torch.nn.Parameter for each in weights)
    # Modules look for weights on CUDA, and flatten no others.
    if not (real and is_on_cudnn(input) and policy.stands_for_cuda() and policy.spelled(0) == "cuda:0"):
        return False
    ordered = _in_order(weights)
    places = itertools.accumulate((each.nbytes for each in ordered), initial=ordered[0].data_ptr())
    return any(each.data_ptr() != place for each, place in zip(ordered, places, strict=False))
