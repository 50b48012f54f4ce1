"""apex: normalizations against the formula, optimizers against torch's own, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import same_with_gradients

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [8, (3, 8)])
@pytest.mark.parametrize("is_rms", [False, True])
def test_normalizations(affine: bool, shape: Any, is_rms: bool) -> None:
    from apex.normalization import FusedLayerNorm, FusedRMSNorm

    module = (FusedRMSNorm if is_rms else FusedLayerNorm)(
        shape, eps=1e-3, elementwise_affine=affine
    ).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    over = (-1,) if shape == 8 else (-2, -1)
    centred = x if is_rms else x - x.mean(over, keepdim=True)
    expected = centred / ((centred**2).mean(over, keepdim=True) + 1e-3).sqrt()
    if affine:
        expected = expected * module.weight
        expected = expected if is_rms else expected + module.bias
    same_with_gradients(module(x), expected, (x, *module.parameters()))
    with pytest.raises(RuntimeError, match="does not end in normalized_shape"):
        module(x[..., :4])


def test_mixed_normalizations_return_the_dtype_of_the_weight() -> None:
    from apex.normalization import FusedLayerNorm, MixedFusedRMSNorm

    x = torch.randn(2, 8, dtype=torch.bfloat16)
    assert (
        MixedFusedRMSNorm(8)(x).dtype == torch.float32
        and FusedLayerNorm(8)(x).dtype == torch.bfloat16
    )


def trained(make: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a parameter after five steps of an optimizer."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64).to(dtype))
    target = torch.randn(4, 3, dtype=torch.float64).to(dtype)
    optimizer = make([parameter])
    for _ in range(5):
        optimizer.zero_grad()
        ((parameter - target) ** 3).abs().sum().backward()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decay: float, decoupled: bool) -> None:
    from apex.optimizers import FusedAdam

    own: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected = trained(lambda given: own(given, lr=0.05, betas=(0.8, 0.9), weight_decay=decay))
    found = trained(
        lambda given: FusedAdam(
            given, 0.05, True, (0.8, 0.9), adam_w_mode=decoupled, weight_decay=decay
        )
    )
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam([torch.nn.Parameter(torch.ones(1))], amsgrad=True)


def test_adam_keeps_moments_and_master_weights_in_float32() -> None:
    from apex.optimizers import FusedAdam

    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = FusedAdam([parameter], lr=1e-4, master_weights=True)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(
        parameter.detach().float(), torch.full((2,), 0.99), atol=4e-3, rtol=0
    )
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "dampening": 0.3},
    ],
)
def test_sgd(options: dict[str, Any]) -> None:
    from apex.optimizers import FusedSGD

    expected = trained(lambda given: torch.optim.SGD(given, 0.05, weight_decay=0.01, **options))
    torch.testing.assert_close(
        trained(lambda given: FusedSGD(given, 0.05, weight_decay=0.01, **options)), expected
    )


def test_sgd_keeps_the_momentum_in_the_dtype_of_the_parameter() -> None:
    from apex.optimizers import FusedSGD

    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = FusedSGD([parameter], lr=0.5, momentum=0.5)
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, 0.25)
        optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"].dtype is torch.float16
    assert parameter.tolist() == [1 - 0.5 * 0.25 - 0.5 * 0.375] * 2


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adagrad(decay: float) -> None:
    from apex.optimizers import FusedAdagrad

    expected = trained(
        lambda given: torch.optim.Adagrad(given, 0.05, weight_decay=decay, eps=1e-10)
    )
    torch.testing.assert_close(
        trained(lambda given: FusedAdagrad(given, 0.05, weight_decay=decay)), expected
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_scaler_leaves_unscaling_to_an_adam_that_can(dtype: torch.dtype) -> None:
    from apex.optimizers import FusedAdam

    parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype, device="cuda"))
    optimizer = FusedAdam([parameter], lr=0.125, capturable=True, master_weights=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale((parameter * 3).sum()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of steps that take a scaler
        scaler.step(optimizer)
    assert parameter.grad.tolist() == [3, 3] and parameter.tolist() == [0.875, 0.875]
    scaler.update()
    parameter.grad.fill_(float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.875, 0.875] and scaler.get_scale() == 2.0
    with pytest.raises(RuntimeError, match="FusedAdam has been updated"):
        optimizer.step(grads=[parameter.grad])


def test_what_torch_has_had_since_is_refused_with_its_name() -> None:
    from apex import amp
    from apex.optimizers import FusedLAMB

    with pytest.raises(
        torchdevice.errors.NotSupportedError, match=r"apex.amp.initialize.*GradScaler"
    ):
        amp.initialize(None, None, opt_level="O1")
    with pytest.raises(torchdevice.errors.NotSupportedError, match="FusedLAMB"):
        FusedLAMB([])
