"""Kernels that do more than their CPU kernel: attention, and what transforms call."""

from __future__ import annotations

import pytest
import torch

import torchdevice


@pytest.mark.parametrize(
    "mask", [torch.eye(4), torch.eye(4) == 0, None], ids=["float", "bool", "none"]
)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (3, 2, 4, 4), (3, 1, 2, 4, 4)], ids=len)
def test_attention_is_identical_to_the_cpu(
    devices: torchdevice.Scope, shape: tuple[int, ...], whole: bool, mask: torch.Tensor | None
) -> None:
    def computed(device: str) -> list[torch.Tensor]:
        inputs = [
            each.to(device).requires_grad_()
            for each in torch.rand((3, *shape), generator=torch.Generator())
        ]
        masked = None if mask is None else mask.to(device).expand(shape if whole else (4, 4))
        found = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=masked)
        return [each.cpu() for each in (found.detach(), *torch.autograd.grad(found.sum(), inputs))]

    assert all(map(torch.equal, computed("cuda"), computed("cpu")))


@pytest.mark.parametrize("shape", [(), (3,)], ids=len)
@pytest.mark.parametrize("learns", [False, True])
def test_attention_of_too_few_dimensions_has_torchs_error(
    devices: torchdevice.Scope, shape: tuple[int, ...], learns: bool
) -> None:
    def error_on(device: str) -> str:
        x = torch.ones(shape, device=device, requires_grad=learns)
        with pytest.raises(RuntimeError) as error:
            torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return str(error.value)

    assert error_on("cuda") == error_on("cpu")


def test_functional_transforms(devices: torchdevice.Scope) -> None:
    weight, x = torch.randn(3, 3, device="cuda"), torch.randn(5, 3, device="cuda")

    def loss(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (row @ w).tanh().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    looped = torch.stack([torch.func.grad(loss)(weight, row) for row in x])
    assert per_sample.is_cuda and torch.allclose(per_sample, looped)
    assert (
        torch.func.jacrev(torch.sin)(x[0]).is_cuda
        and torch.func.hessian(lambda v: v.pow(3).sum())(x[0]).is_cuda
    )
    _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
    assert torch.allclose(tangent, x.cos())
    with torch.inference_mode():
        assert (x @ weight).is_inference()
    values = torch.func.functional_call(torch.nn.Linear(3, 2).cuda(), {}, (x,))
    assert values.is_cuda
