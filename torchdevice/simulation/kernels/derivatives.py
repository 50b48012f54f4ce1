"""Derivatives of the operator the real device calls, where another computes values here.

A node of autograd around the inputs raises the errors of derivatives that the real device lacks.
torch is the table: it has a class of nodes for each formula of a derivative, and an operator
without a formula for forward mode refuses tensors of the meta device in the same words. The
operators of CUDA and MPS are in every build.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import forward_ad

from torchdevice.kernel.stand_ins import mapped, tensors

Refusal: TypeAlias = "tuple[type[Exception], str] | None"
"""The class and the text of an error; None where there is a derivative."""


class Derivatives(NamedTuple):
    """The refusals of an operator's derivatives.

    Attributes:
        operator: The name of the operator in ATen.
        backward: The name of the operator that computes its gradients.
        first: The refusal of its gradients.
        second: The refusal of its gradients' gradients.
    """

    operator: str
    backward: str
    first: Refusal = None
    second: Refusal = None


@functools.cache
def derivatives_of(operator: str, backward: str) -> Derivatives:
    """Return torch's refusals of an operator's derivatives."""
    formula = "".join(part.title() for part in backward.split("_"))
    known = any(hasattr(torch._C._functions, f"{formula}Backward{number}") for number in range(2))
    refusal = (RuntimeError, f"derivative for aten::{backward} is not implemented")
    return Derivatives(operator, backward, second=None if known else refusal)


@functools.cache
def in_forward_mode(operator: str) -> Refusal:
    """Return how an operator refuses tensors with tangents, before its kernel is called."""
    # In its own thread, as the calling one may be in the kernel of a functorch transform.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_asked_on_meta, operator).result()


def _asked_on_meta(operator: str) -> Refusal:
    op = getattr(torch.ops.aten, operator).default
    with contextlib.nullcontext() if differentiates_forward() else forward_ad.dual_level():
        primal = torch.empty(1, 1, 1, 1, device="meta")
        dual = forward_ad.make_dual(primal, primal)
        given = {
            "Tensor": dual,
            "List[Tensor]": [dual],
            "int": 1,
            "float": 0.0,
            "bool": False,
            "List[int]": [],
        }
        arguments = [each for each in op._schema.arguments if not each.kwarg_only]
        try:
            op(*(given.get(str(each.type)) for each in arguments))
        except NotImplementedError as error:
            return NotImplementedError, str(error)
        return None


def differentiates_forward() -> bool:
    """Return whether forward mode is on, by ``forward_ad`` or a transform of functorch."""
    return forward_ad._current_level >= 0


def are_transformed() -> bool:
    """Return whether a transform of functorch runs."""
    return torch._C._are_functorch_transforms_active()


def are_asked(given: Any) -> bool:
    """Return whether autograd watches tensors among a call's arguments, or may see tangents."""
    return differentiates_forward() or (
        torch.is_grad_enabled() and any(each.requires_grad for each in tensors(list(given)))
    )


def refusing(derivatives: Derivatives, args: Any) -> Any:
    """Return a call's arguments, with a node of these derivatives around those autograd watches.

    Raises:
        NotImplementedError: An argument has a tangent, and the operator has no derivative in
            forward mode.
    """
    found = {id(each): each for each in tensors(list(args))}
    refuse_tangents(derivatives, found.values())
    given = [each for each in found.values() if each.requires_grad]
    if not (given and torch.is_grad_enabled()):
        return args
    watched = dict(zip(map(id, given), _Node.in_a_kernel(derivatives, *given), strict=True))
    return mapped(args, lambda each: watched.get(id(each), each))


def refuse_tangents(derivatives: Derivatives, given: Iterable[torch.Tensor]) -> None:
    """Check that no argument has a tangent if the operator has no forward-mode derivative.

    Raises:
        NotImplementedError: One has.
    """
    if not differentiates_forward():
        return
    if any(forward_ad.unpack_dual(each).tangent is not None for each in given):
        _raise(in_forward_mode(derivatives.operator))


def refuse_second(derivatives: Derivatives, result: torch.Tensor) -> None:
    """Let the node of a result refuse gradients of its gradients, as far as the operator does.

    The graph has no node more, so that torch's errors name the nodes of the program. The result
    must be that of a single node.
    """
    if result.grad_fn is not None and derivatives.second is not None:
        result.grad_fn.register_hook(functools.partial(_refused_further, derivatives))


def _refused_further(derivatives: Derivatives, gradients: Any, _: Any) -> Any:
    """Return gradients with a node around them that refuses theirs, where autograd watches them."""
    if not torch.is_grad_enabled() or derivatives.second is None:
        return gradients
    of_gradients = Derivatives(derivatives.backward, "", first=derivatives.second)
    return tuple(each if each is None else _Node.apply(of_gradients, each)[0] for each in gradients)


class _Node(torch.autograd.Function):
    """Refuses gradients; those of gradients come to a second node, around the gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(derivatives: Derivatives, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.detach() for each in given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.derivatives = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        derivatives: Derivatives = ctx.derivatives
        _raise(derivatives.first)
        return None, *_refused_further(derivatives, gradients, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> Any:
        derivatives: Derivatives = ctx.derivatives
        _raise(in_forward_mode(derivatives.operator))
        return tuple(each if each is None else each.view_as(each) for each in tangents[1:])

    @classmethod
    def in_a_kernel(
        cls, derivatives: Derivatives, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Apply it in a kernel, visibly for the functorch transform that called the kernel."""
        if not are_transformed():
            # What `apply` of `Function` calls, after it has bound the arguments in as much time as
            # the node takes.
            return super(torch.autograd.Function, cls).apply(derivatives, *given)  # type: ignore[no-any-return]
        excluded = torch._C._dispatch_tls_local_exclude_set() - _OF_FUNCTORCH
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
            return cls.apply(derivatives, *given)  # type: ignore[no-any-return]


def _raise(refusal: Refusal) -> None:
    if refusal is not None:
        kind, text = refusal
        raise kind(text)


_Keys, _Key = torch._C.DispatchKeySet, torch._C.DispatchKey

_OF_FUNCTORCH = (
    _Keys(_Key.FuncTorchDynamicLayerFrontMode)
    | _Keys(_Key.FuncTorchGradWrapper)
    | _Keys(_Key.FuncTorchBatched)
    | _Keys(_Key.FuncTorchVmapMode)
)
"""The keys that a transform excludes while it calls a kernel."""
