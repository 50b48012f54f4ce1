"""What CUDA computes in float32 for halves, and rounds once, is rounded once on simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchdevice

HALVES = (torch.float16, torch.bfloat16)
NATIVES = ("never", "auto")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def whole(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(most))


X, WEIGHT, BIAS = drawn(24, 64), drawn(64), drawn(1, 64)[0]
IMAGES, SCALES, SHIFTS = drawn(4, 8, 9, 9), drawn(8), drawn(1, 8)[0]
TABLE, ROWS = drawn(7, 12), whole(7, 300)
BAGS = ROWS.view(10, 30)

Function = Callable[..., torch.Tensor]

DIFFERENTIATED: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), (X, WEIGHT, BIAS)),
    "layer norm, no weight": (lambda x: F.layer_norm(x, (64,)), (X,)),
    "batch norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (IMAGES, SCALES, SHIFTS),
    ),
    "batch norm, no weight": (lambda x: F.batch_norm(x, None, None, training=True), (IMAGES,)),
    "logsigmoid": (F.logsigmoid, (X,)),
    "glu": (F.glu, (X,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 1), (IMAGES,)),
    "embedding": (lambda table: F.embedding(ROWS.to(table.device), table), (TABLE,)),
    "embedding_bag, sum": (
        lambda table: F.embedding_bag(BAGS.to(table.device), table, mode="sum"),
        (TABLE,),
    ),
    "logit": (torch.logit, (X.sigmoid(),)),
}

COMPUTED: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "log_softmax": (lambda x: F.log_softmax(x, -1), (X,)),
    "softmax": (lambda x: F.softmax(x, 0), (X,)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), (drawn(2, 3, 7, 7, 7),)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2.3, mode="bicubic"), (IMAGES,)),
    "linear": (lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"), (drawn(2, 3, 20),)),
    "trilinear": (
        lambda x: F.interpolate(x, scale_factor=1.7, mode="trilinear"),
        (drawn(2, 2, 5, 5, 5),),
    ),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (IMAGES, drawn(4, 5, 5, 2).tanh()),
    ),
    "nll_loss": (lambda x: F.nll_loss(x, whole(64, 24).to(x.device)), (X,)),
    "prod": (torch.prod, (X[0].sigmoid() + 0.5,)),
    "prod of rows": (lambda x: torch.prod(x, 1), (X.sigmoid() + 0.5,)),
    "rsqrt": (torch.rsqrt, (X.exp(),)),
    "rsqrt_": (lambda x: x.clone().rsqrt_(), (X.exp(),)),
    "entr": (torch.special.entr, (X.exp(),)),
    "i0e": (torch.special.i0e, (X,)),
    "xlogy": (torch.xlogy, (X, X.flip(0).exp())),
    "xlogy of a number": (lambda x: torch.xlogy(0.375, x), (X.exp(),)),
    "xlogy_": (lambda x, y: x.clone().xlogy_(y), (X, X.flip(0).exp())),
    "xlog1py": (torch.special.xlog1py, (X, X.flip(0).exp())),
    "x + 0.3": (lambda x: x + 0.3, (X,)),
    "0.3 - x": (lambda x: 0.3 - x, (X,)),
    "x - 0.3": (lambda x: x - 0.3, (X,)),
    "x + 2051": (lambda x: x + 2051, (X,)),
    "add_": (lambda x: x.clone().add_(0.3), (X,)),
    "add, alpha": (lambda x, y: torch.add(x, y, alpha=0.3), (X, X.flip(0))),
    "sub_, alpha": (lambda x, y: x.clone().sub_(y, alpha=0.3), (X, X.flip(0))),
}


@pytest.mark.parametrize("native", NATIVES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [*COMPUTED, *DIFFERENTIATED])
def test_a_value_is_rounded_once(name: str, dtype: torch.dtype, native: Any) -> None:
    function, given = {**COMPUTED, **DIFFERENTIATED}[name]
    halves = [each.to(dtype) for each in given]
    expected = function(*(each.float() for each in halves)).to(dtype)
    with torchdevice.simulate(native=native):
        found = function(*(each.cuda() for each in halves))
        assert found.dtype is dtype
        found = found.cpu()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("native", NATIVES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_gradient_is_rounded_once(name: str, dtype: torch.dtype, native: Any) -> None:
    function, given = DIFFERENTIATED[name]
    wide = [each.to(dtype).float().requires_grad_() for each in given]
    result = function(*wide)
    upstream = drawn(*result.shape).to(dtype)
    expected = torch.autograd.grad(result, wide, upstream.float())
    with torchdevice.simulate(native=native):
        halves = [each.to(dtype).cuda().requires_grad_() for each in given]
        found = torch.autograd.grad(function(*halves), halves, upstream.cuda())
        found = [each.cpu() for each in found]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is dtype
        assert torch.equal(one, other.to(dtype))


@pytest.mark.parametrize("native", NATIVES)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_running_mean_of_halves_is_rounded_once(dtype: torch.dtype, native: Any) -> None:
    images, mean = IMAGES.to(dtype), SCALES.to(dtype)
    exact, ones = mean.float(), torch.ones(8)
    F.batch_norm(images.float(), exact, ones, training=True)
    with torchdevice.simulate(native=native):
        found, variance = mean.cuda(), torch.ones(8, dtype=dtype, device="cuda")
        F.batch_norm(images.cuda(), found, variance, training=True)
        found, variance = found.cpu(), variance.cpu()
    assert torch.equal(found, exact.to(dtype))
    assert torch.equal(variance, ones.to(dtype))


def test_what_a_derivative_reads_has_the_dtype_that_it_has_on_cuda() -> None:
    with torchdevice.simulate():
        x, weight = X.half().cuda(), WEIGHT.half().cuda()
        _, mean, deviation = torch.native_layer_norm(x, (64,), weight, weight, 1e-5)
        assert {mean.dtype, deviation.dtype} == {torch.float32}


def test_halves_beside_float32_are_promoted() -> None:
    with torchdevice.simulate():
        x, y = X.half().cuda(), X.cuda()
        assert torch.xlogy(x, y.exp()).dtype is torch.float32
        assert torch.add(x, y, alpha=0.3).dtype is torch.float32


# CUDA's kernels read a CPU tensor without dimensions as a number, unrounded.
@pytest.mark.parametrize("native", NATIVES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("function", [torch.add, torch.sub, torch.rsub, torch.xlogy])
def test_a_tensor_of_the_device_without_dimensions_is_rounded(
    function: Any, dtype: torch.dtype, native: Any
) -> None:
    x, number = X.to(dtype), torch.tensor(0.3, dtype=torch.float64)
    expected = function(x.float(), number.to(dtype).item()).to(dtype)
    with torchdevice.simulate(native=native):
        assert torch.equal(function(x.cuda(), number.cuda()).cpu(), expected)
        if function in (torch.add, torch.sub):
            found = function(x.cuda(), number).cpu()
            assert torch.equal(found, function(x.float(), 0.3).to(dtype))
