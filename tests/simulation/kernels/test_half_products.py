"""Products of simulated halves on a CPU without instructions: in float32, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchdevice
from torchdevice.kernel.devices import cpu
from torchdevice.simulation.kernels import half_products, vector_products

HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def no_instructions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "computes_in_float16", lambda: False)
    monkeypatch.setattr(cpu, "computes_in_bfloat16", lambda: False)
    yield


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


X, W, B = drawn(48, 64), drawn(64, 32), drawn(48, 32)
BATCH = drawn(2, 48, 64)
IMAGES, KERNELS = drawn(2, 4, 24, 24), drawn(8, 4, 3, 3)

PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "mm": (torch.mm, (X, W)),
    "addmm": (torch.addmm, (B, X, W)),
    "addmm_": (lambda b, x, w: b.clone().addmm_(x, w, alpha=0.5), (B, X, W)),
    "mv": (torch.mv, (X, W[:, 0].contiguous())),
    "bmm": (torch.bmm, (BATCH, BATCH.mT.contiguous())),
    "baddbmm": (torch.baddbmm, (drawn(2, 48, 48), BATCH, BATCH.mT.contiguous())),
    "linear": (F.linear, (BATCH, W.mT.contiguous(), drawn(32))),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x), (BATCH,)),
    "conv2d": (lambda x, k: F.conv2d(x, k, padding=1), (IMAGES, KERNELS)),
    "conv_transpose2d": (lambda x, k: F.conv_transpose2d(x, k), (drawn(2, 8, 12, 12), KERNELS)),
    "erfinv": (torch.erfinv, (X.tanh() * 0.9,)),
    "erfc": (torch.erfc, (X,)),
    "square": (torch.square, (X,)),
    "dot": (torch.dot, (X.reshape(-1), X.reshape(-1))),
    "vdot": (torch.vdot, (X.reshape(-1), X.reshape(-1))),
    "tan": (torch.tan, (X.tanh(),)),
    "tanh": (torch.tanh, (X,)),
    "variance": (lambda x: x.var(1), (X,)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (drawn(1, 2, 32, 16),)),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_float32_rounded_once(name: str, dtype: torch.dtype) -> None:
    function, given = PRODUCTS[name]
    halves = [each.to(dtype) for each in given]
    expected = function(*(each.float() for each in halves)).to(dtype)
    with torchdevice.simulate(native="never"):
        found = function(*(each.cuda() for each in halves)).cpu()
    assert found.dtype is dtype
    assert torch.equal(found, expected)


IN_FLOAT16: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "grid": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (IMAGES, drawn(2, 24, 24, 2).tanh()),
    ),
    "grid of volumes": (
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (drawn(2, 3, 8, 8, 8), drawn(2, 8, 8, 8, 3).tanh()),
    ),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), (X,)),
    "logit": (torch.logit, (X.sigmoid(),)),
}


@pytest.mark.parametrize("name", IN_FLOAT16)
def test_what_is_slow_in_float16_alone(name: str) -> None:
    function, given = IN_FLOAT16[name]
    halves = [each.half() for each in given]
    expected = function(*(each.float() for each in halves)).half()
    with torchdevice.simulate(native="never"):
        found = function(*(each.cuda() for each in halves)).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_functions_are_slow_where_products_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels use no instructions for half precision."""
    monkeypatch.setattr(cpu, "computes_in_float16", lambda: True)
    monkeypatch.setattr(cpu, "computes_in_bfloat16", lambda: True)
    assert half_products.slow_dtypes(torch.ops.aten.mm.default) == set()
    assert half_products.slow_dtypes(torch.ops.aten.erfinv.default) == set(HALVES)


@pytest.mark.parametrize(("has_vectors", "slow"), [(True, {torch.bfloat16}), (False, set(HALVES))])
@pytest.mark.parametrize("name", ["dot", "vdot"])
def test_sums_in_float16_are_slow_without_vector_instructions(
    name: str, has_vectors: bool, slow: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_products, "sums_in_vectors", lambda: has_vectors)
    assert half_products.slow_dtypes(getattr(torch.ops.aten, name).default) == slow


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_its_gradients_are_computed_in_the_same_way(name: str, dtype: torch.dtype) -> None:
    function, given = PRODUCTS[name]
    here = [each.to(dtype).float().requires_grad_() for each in given]
    function(*here).sum().backward()
    with torchdevice.simulate(native="never"):
        there = [each.to(dtype).cuda().requires_grad_() for each in given]
        function(*there).sum().backward()
        found = [each.grad.cpu().float() for each in there if each.grad is not None]
    for one, other in zip(found, here, strict=True):
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(one, other.grad, rtol=2e-2, atol=2e-2 * max(scale, 1))


def computed_in(monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[torch.dtype]:
    """Return the dtypes in which the CPU's kernel computes a product of half tensors in a scope."""
    seen, widened = {torch.float16}, half_products._widened

    def noted(value: Any) -> Any:
        result = widened(value)
        seen.update({result.dtype} if isinstance(result, torch.Tensor) else ())
        return result

    monkeypatch.setattr(half_products, "_widened", noted)
    with torchdevice.simulate(native="never", **options):
        x = X.half().cuda()
        assert (x @ W.half().cuda()).dtype is torch.float16
    return seen - {torch.float16}


def test_the_option_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        computed_in(monkeypatch)
        == computed_in(monkeypatch, half_products="float32")
        == {torch.float32}
    )
    assert computed_in(monkeypatch, half_products="target") == set()
    monkeypatch.setattr(cpu, "computes_in_float16", lambda: True)
    assert computed_in(monkeypatch) == set()
    assert computed_in(monkeypatch, half_products="float32") == {torch.float32}


@pytest.mark.parametrize("native", ["never", "auto"])
def test_the_gradients_of_convolutions_in_float16_also_where_the_cpu_has_instructions(
    native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "computes_in_float16", lambda: True)
    monkeypatch.setattr(cpu, "computes_in_bfloat16", lambda: True)
    widened, seen = half_products._widened, []
    monkeypatch.setattr(
        half_products, "_widened", lambda value: seen.append(value) or widened(value)
    )
    for dtype in HALVES:
        seen.clear()
        with torchdevice.simulate(native=native):
            x, w = (each.to(dtype).cuda().requires_grad_() for each in (IMAGES, KERNELS))
            F.conv2d(x, w).square().sum().backward()
        assert bool(seen) is (dtype is torch.float16)
    seen.clear()
    with torchdevice.simulate(native=native, half_products="target"):
        F.conv2d(x := IMAGES.half().cuda().requires_grad_(), KERNELS.half().cuda()).sum().backward()
        assert x.grad is not None
    assert not seen


def test_small_and_mixed_products_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        half_products, "_widened", lambda value: pytest.fail("a product was widened")
    )
    with torchdevice.simulate(native="never"):
        small = torch.ones(4, 4, device="cuda", dtype=torch.float16)
        assert (small @ small).sum().item() == 64
        with pytest.raises(RuntimeError, match="same dtype"):
            X.half().cuda() @ W.bfloat16().cuda()
