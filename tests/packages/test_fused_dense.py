"""flash_attn's dense layers and activations, against the definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import drawn, same_with_gradients

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


def test_dense() -> None:
    from flash_attn.ops.fused_dense import FusedDense, fused_dense_func

    layer, x = FusedDense(3, 4, return_residual=True, dtype=torch.float64), drawn(2, 3)
    out, residual = layer(x)
    expected = x @ layer.weight.T + layer.bias
    same_with_gradients(out, expected, (x, layer.weight, layer.bias))
    assert residual is x
    torch.testing.assert_close(fused_dense_func(x, layer.weight, layer.bias), expected)
    assert fused_dense_func(x, layer.weight, return_residual=True)[1] is x
    for call in (
        lambda: fused_dense_func(x, layer.weight, process_group="tensor"),
        lambda: layer(x, process_group="tensor"),
    ):
        with pytest.raises(torchdevice.errors.NotSupportedError, match="ColwiseParallel"):
            call()


@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu"])
def test_two_layers(activation: str) -> None:
    from flash_attn.ops.fused_dense import FusedMLP

    mlp, x = FusedMLP(3, 5, activation=activation, dtype=torch.float64), drawn(2, 3)
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    positive = (hidden + hidden.abs()) / 2
    inner = (2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)
    active: Any = {
        "gelu_approx": hidden * (1 + torch.tanh(inner)) / 2,
        "relu": positive,
        "sqrelu": positive**2,
    }[activation]
    expected = active @ mlp.fc2.weight.T + mlp.fc2.bias
    same_with_gradients(mlp(x), expected, (x, *mlp.parameters()))
    assert FusedMLP(3, return_residual=True).fc1.out_features == 12
    with pytest.raises(AssertionError, match="'silu' is not one of gelu_approx, relu, sqrelu"):
        FusedMLP(3, activation="silu")
    with pytest.raises(torchdevice.errors.NotSupportedError, match="ColwiseParallel"):
        mlp(x, process_group="tensor")


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda", "simulated:mps"])
def test_residuals_have_the_dtype_of_autocast(target: str) -> None:
    with torchdevice.portable(target=target):
        from flash_attn.ops.fused_dense import FusedDense, FusedMLP, fused_dense_func

        x, weight = torch.randn(2, 3, device="cuda"), torch.randn(4, 3, device="cuda")
        layer, mlp = (
            kind(3, 4, return_residual=True, device="cuda") for kind in (FusedDense, FusedMLP)
        )
        for call in (layer, mlp, lambda x: fused_dense_func(x, weight, return_residual=True)):
            with torch.autocast("cuda", torch.bfloat16):
                out, residual = call(x)
            assert out.dtype is torch.bfloat16 and torch.equal(residual, x.bfloat16())
            assert call(x)[1] is x


def test_autocast_leaves_residuals_in_float64_alone() -> None:
    from flash_attn.ops.fused_dense import FusedDense

    x = drawn(2, 3)
    with torch.autocast("cuda", torch.bfloat16):
        out, residual = FusedDense(3, 4, return_residual=True, dtype=torch.float64)(x)
    assert out.dtype is torch.float64 and residual is x


def test_swiglu() -> None:
    from flash_attn.ops.activations import swiglu

    x, y = drawn(2, 3), drawn(2, 3)
    same_with_gradients(swiglu(x, y), x / (1 + torch.exp(-x)) * y, (x, y))
    halves = x.detach().half(), y.detach().half()
    exact = halves[0].double() / (1 + torch.exp(-halves[0].double())) * halves[1].double()
    assert torch.equal(swiglu(*halves), exact.half())
