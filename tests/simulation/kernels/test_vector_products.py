"""Products of halves with one vector: by torch's kernel where it is fast, and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchdevice
from torchdevice.kernel.devices import cpu
from torchdevice.simulation.kernels import half_products, vector_products


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


MATRIX, VECTOR, ADDED = drawn(160, 192), drawn(192), drawn(160)

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

PRODUCTS: dict[str, Product] = {
    "mv": lambda m, v, b: torch.mv(m, v),
    "matmul": lambda m, v, b: m @ v,
    "row": lambda m, v, b: v[None] @ m.t(),
    "column": lambda m, v, b: m @ v[:, None],
    "transposed row": lambda m, v, b: v[:, None].contiguous().t() @ m.t(),
    "linear": lambda m, v, b: F.linear(v, m),
    "linear with bias": lambda m, v, b: F.linear(v, m, b),
    "one output": lambda m, v, b: F.linear(m, v[None], b[:1]),
    "addmv": lambda m, v, b: torch.addmv(b, m, v, beta=0.3, alpha=0.7),
    "addmv_": lambda m, v, b: b.clone().addmv_(m, v, beta=0.3, alpha=0.7),
    "addmm": lambda m, v, b: torch.addmm(b, v[None], m.t(), beta=0.3, alpha=0.7),
    "addmm of a column": lambda m, v, b: torch.addmm(b[:, None], m, v[:, None], beta=0.3),
    "every second element": lambda m, v, b: torch.mv(m, torch.stack((v, v), 1)[:, 0]),
    "rows apart": lambda m, v, b: torch.mv(torch.cat((m, m), 1)[:, : len(v)], v),
}

IN_FLOAT32: dict[str, Product] = {
    "column-major": lambda m, v, b: torch.mv(m.t().contiguous().t(), v),
    "repeated row": lambda m, v, b: torch.mv(m[:1].expand(160, 192), v),
    "short": lambda m, v, b: torch.mv(m[:, :64].contiguous(), v[:64]),
    "two rows": lambda m, v, b: torch.stack((v, v)) @ m.t(),
    "one number added": lambda m, v, b: torch.addmv(b[:1], m, v),
}


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the arguments that are converted to float32, on a CPU without half
    instructions whose vector instructions torch uses.
    """
    of_float32, seen = half_products._widened, []

    def noted(value: Any) -> Any:
        seen.append(value)
        return of_float32(value)

    monkeypatch.setattr(half_products, "_widened", noted)
    monkeypatch.setattr(cpu, "computes_in_float16", lambda: False)
    monkeypatch.setattr(cpu, "computes_in_bfloat16", lambda: False)
    monkeypatch.setattr(vector_products, "sums_in_vectors", lambda: True)
    return seen


def check(product: Product, dtype: torch.dtype, **options: Any) -> None:
    """Compare a product on a simulated device with that of float64: it is rounded once."""
    given = [each.to(dtype) for each in (MATRIX, VECTOR, ADDED)]
    with torchdevice.simulate(**options):
        found = product(*(each.cuda() for each in given)).cpu()
    exact = product(*(each.double() for each in given))
    size = product(*(each.double().abs() for each in given))
    assert found.dtype is dtype
    assert found.shape == exact.shape
    half_a_place = exact.abs() * torch.finfo(dtype).eps / 2
    assert ((found.double() - exact).abs() <= half_a_place + size * 2**-20).all()


@pytest.mark.parametrize("native", ["never", "auto"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_major_matrix_times_a_vector_is_left_to_torch(
    name: str, native: str, widened: list[Any]
) -> None:
    check(PRODUCTS[name], torch.float16, native=native)
    assert not widened


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_other_products_are_computed_in_float32(name: str, widened: list[Any]) -> None:
    check(IN_FLOAT32[name], torch.float16, native="never")
    assert widened


@pytest.mark.parametrize("name", PRODUCTS)
def test_so_are_all_where_torch_uses_no_vector_instructions(
    name: str, widened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_products, "sums_in_vectors", lambda: False)
    check(PRODUCTS[name], torch.float16, native="never")
    assert widened


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512", "SVE256"])
def test_torch_says_which_instructions_it_uses(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert vector_products.sums_in_vectors.__wrapped__() is capability.startswith("AVX")


@pytest.mark.parametrize("name", PRODUCTS)
def test_bfloat16_without_instructions_is_computed_in_float32(
    name: str, widened: list[Any]
) -> None:
    check(PRODUCTS[name], torch.bfloat16, native="never")
    assert widened


@pytest.mark.parametrize("name", ["mv", "matmul", "addmv", "addmv_", "every second element"])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_bfloat16_with_instructions_multiplies_a_row(
    name: str, has_instructions: bool, widened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "computes_in_bfloat16", lambda: True)
    monkeypatch.setattr(vector_products, "sums_in_vectors", lambda: has_instructions)
    multiplied, of_row = [], vector_products._row

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = of_row(*args, **kwargs)
        multiplied.append(result)
        return result

    monkeypatch.setattr(vector_products, "_row", noted)
    if has_instructions:
        check(PRODUCTS[name], torch.bfloat16, native="never")
    else:
        with torchdevice.simulate(native="never"):
            PRODUCTS[name](*(each.bfloat16().cuda() for each in (MATRIX, VECTOR, ADDED)))
    assert not widened
    assert len(multiplied) == has_instructions


def test_the_option_decides_as_of_other_products(widened: list[Any]) -> None:
    check(PRODUCTS["mv"], torch.float16, native="never", half_products="target")
    assert not widened
    check(PRODUCTS["mv"], torch.float16, native="never", half_products="float32")
    assert widened


def test_gradients_of_a_product_with_a_vector(widened: list[Any]) -> None:
    here = [each.half().float().requires_grad_() for each in (MATRIX, VECTOR)]
    torch.mv(*here).square().sum().backward()
    with torchdevice.simulate(native="never"):
        there = [each.half().cuda().requires_grad_() for each in (MATRIX, VECTOR)]
        torch.mv(*there).square().sum().backward()
        found = [each.grad.cpu().float() for each in there if each.grad is not None]
    for one, other in zip(found, here, strict=True):
        assert other.grad is not None
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(one, other.grad, rtol=5e-3, atol=2e-3 * scale)


MISTAKES: dict[str, Product] = {
    "mv": lambda m, v, b: torch.mv(m, v[1:]),
    "mv of a row": lambda m, v, b: torch.mv(m[0], v),
    "mm": lambda m, v, b: torch.mm(v[None, 1:], m.t()),
    "mm of a vector": lambda m, v, b: torch.mm(m, v),
    "addmv": lambda m, v, b: torch.addmv(b[1:], m, v),
    "addmm": lambda m, v, b: torch.addmm(b[1:, None], m, v[:, None]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_does_not_fit_raises_torchs_own_error(name: str, widened: list[Any]) -> None:
    given = [each.half() for each in (MATRIX, VECTOR, ADDED)]
    with pytest.raises(RuntimeError) as expected:
        MISTAKES[name](*given)
    with torchdevice.simulate(native="never"), pytest.raises(RuntimeError) as found:
        MISTAKES[name](*(each.cuda() for each in given))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("native", ["never", "auto"])
@pytest.mark.parametrize("name", ["dot", "vdot"])
def test_sums_of_products_in_float16_are_rounded_once(name: str, native: str) -> None:
    function = getattr(torch, name)
    check(lambda m, v, b: function(m.reshape(-1), m.reshape(-1).flip(0)), torch.float16)
    check(lambda m, v, b: function(m.t()[0], m.t()[1]), torch.float16, native=native)
