"""``flex_attention`` with gradients: eager and compiled, against ordinary attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import plain_torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import torchdevice

pytestmark = pytest.mark.filterwarnings("ignore")


def inputs(*, gradient: bool, device: str = "cuda") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(1, 2, 128, 16, generator=generator) for _ in range(3))
    return [each.to(device).detach().requires_grad_(gradient) for each in made]


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def attend(how: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return causal attention and, if wanted, the gradients of its inputs."""
    if how is scaled_dot_product_attention:
        out = how(*tensors, is_causal=True)
    else:
        out = how(*tensors, block_mask=create_block_mask(causal, 1, 1, 128, 128, device="cuda"))
    if tensors[0].requires_grad:
        out.square().sum().backward()
    return [
        each.detach().cpu() for each in (out, *(each.grad for each in tensors)) if each is not None
    ]


WAYS: dict[str, Callable[[], Callable[..., Any]]] = {
    "eager": lambda: flex_attention,
    "aot_eager": lambda: torch.compile(flex_attention, backend="aot_eager", fullgraph=True),
    "inductor": lambda: torch.compile(flex_attention, fullgraph=True),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients(cuda: torchdevice.Scope, way: str, gradient: bool) -> None:
    torch._dynamo.reset()
    found = attend(WAYS[way](), inputs(gradient=gradient))
    with plain_torch():
        expected = attend(scaled_dot_product_attention, inputs(gradient=gradient, device="cpu"))
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_scores_take_numbers_from_a_tensor(cuda: torchdevice.Scope, way: str) -> None:
    """ALiBi: an index that is a tensor of no dimension, of which fake tensors have no value."""
    torch._dynamo.reset()

    def attended(device: str) -> list[torch.Tensor]:
        given = inputs(gradient=True, device=device)
        slopes = torch.tensor([0.5, 0.25], device=device)
        if device == "cuda":
            out = WAYS[way]()(
                *given,
                score_mod=lambda score, _, head, query, key: score + (key - query) * slopes[head],
            )
        else:
            steps = torch.arange(128)
            biases = (steps[None] - steps[:, None]) * slopes[:, None, None]
            out = scaled_dot_product_attention(*given, attn_mask=biases)
        out.square().sum().backward()
        return [each.detach().cpu() for each in (out, *(each.grad for each in given))]

    found = attended("cuda")
    with plain_torch():
        expected = attended("cpu")
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_not_compiled_is_reported() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention)
    with torchdevice.portable("cpu") as scope:
        attend(flex_attention, inputs(gradient=True))
        assert {entry.requested for entry in scope.journal.entries} >= {
            "flex_attention with a gradient"
        }
        assert not scope.journal.degraded, "eager attention is what CUDA runs too"
        attend(compiled, inputs(gradient=False))
        assert not scope.journal.degraded, "Inductor has code for the forward"
        attend(compiled, inputs(gradient=True))
        assert [entry.requested for entry in scope.journal.degraded] == [
            "torch.compile with inductor"
        ]
    torch._dynamo.reset()
    with (
        torchdevice.portable("cpu", strict=True),
        pytest.raises(RuntimeError, match="the scope is strict"),
    ):
        attend(torch.compile(flex_attention), inputs(gradient=True))


def test_tensors_elsewhere_are_torchs_to_judge(cuda: torchdevice.Scope) -> None:
    elsewhere = [torch.ones(1, 2, 128, 16, device="meta") for _ in range(3)]
    with warnings.catch_warnings(), pytest.raises(ValueError, match="only supported on CUDA"):
        flex_attention(*elsewhere)
