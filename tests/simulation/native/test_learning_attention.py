"""Differentiated attention is alike in C++ and Python: values, gradients, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchdevice

pytestmark = [
    pytest.mark.one_engine,
    pytest.mark.usefixtures("native_kernels"),
    pytest.mark.filterwarnings(
        "ignore:mps has no torch.float64", "ignore:There is a performance drop"
    ),
]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "dropout": {"dropout_p": 0.5},
    "groups": {"enable_gqa": True},
}

KINDS: dict[str, dict[str, Any]] = {
    "all learn": {},
    "values learn": {"learning": (2,)},
    "nothing learns": {"learning": ()},
    "learning mask": {"mask": torch.float32, "learning": (0, 3)},
    "mask": {"mask": torch.float32},
    "mask of bools": {"mask": torch.bool},
    "double": {"dtype": torch.float64},
    "half": {"dtype": torch.float16},
    "narrow": {"size": 3},
    "three dimensions": {"batches": ()},
}


def said(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or its error."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def answers(
    options: dict[str, Any],
    *,
    learning: tuple[int, ...] = (0, 1, 2),
    mask: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    size: int = 16,
    batches: tuple[int, ...] = (2,),
) -> dict[str, Any]:
    """Return attention's values, kind of node, gradients, and second gradients or refusals."""
    torch.manual_seed(0)
    few = 2 if "enable_gqa" in options else 4
    given = [
        torch.randn(*batches, heads, 8, size, device="cuda", dtype=dtype) for heads in (4, few, few)
    ]
    if mask is not None:
        drawn = torch.rand(8, 8, device="cuda", dtype=torch.float32)
        given.append(drawn > 0.1 if mask is torch.bool else drawn.to(mask))
    leaves = [given[each].requires_grad_() for each in learning]

    def attended() -> Any:
        return F.scaled_dot_product_attention(*given, **options)

    result = said(attended)
    if isinstance(result, tuple):
        return {"refused": result}
    found = {"values": result.detach().cpu().tolist(), "node": type(result.grad_fn).__name__}
    if leaves:
        gradients = torch.autograd.grad(result.sum(), leaves, create_graph=True)
        found["gradients"] = [each.detach().cpu().tolist() for each in gradients]
        penalty = torch.stack([each.pow(2).sum() for each in gradients]).sum()
        found["second"] = said(lambda: torch.autograd.grad(penalty, leaves)[0].sum().item())
        result = attended()
        with torch.no_grad():
            given[2].mul_(2)
        found["written since"] = said(
            lambda: torch.autograd.grad(result.sum(), leaves[0])[0].sum().item()
        )
    return found


@pytest.mark.parametrize("model", ["a100", "t4", "mps"])
@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("call", [*CALLS])
def test_each_call_is_the_same_both_ways(call: str, kind: str, model: str) -> None:
    found = []
    for native in ("never", "always"):
        with torchdevice.simulate(model, native=native, written_for="cuda"):
            found.append([answers(CALLS[call], **KINDS[kind]) for _ in range(2)])
    assert found[0] == found[1]


@pytest.mark.parametrize("native", ["never", "always"])
class TestBothWays:
    def test_a_write_between_forward_and_backward_is_told_as_torch_tells_it(
        self, native: Any
    ) -> None:
        with torchdevice.simulate(native=native):
            q = torch.randn(1, 2, 8, 16, device="cuda", requires_grad=True)
            result = F.scaled_dot_product_attention(q, q, q)
            with torch.no_grad():
                q.mul_(2)
            with pytest.raises(
                RuntimeError, match=r"^one of the variables needed for gradient computation"
            ):
                result.sum().backward()

    def test_a_change_of_settings_changes_the_choice(self, native: Any) -> None:
        with torchdevice.simulate(native=native):
            q = torch.randn(1, 2, 8, 16, device="cuda", requires_grad=True)
            for _ in range(2):
                for first, refuses in (
                    (SDPBackend.MATH, False),
                    (SDPBackend.EFFICIENT_ATTENTION, True),
                ):
                    with sdpa_kernel([first, SDPBackend.MATH]):
                        result = F.scaled_dot_product_attention(q, q, q)
                    (gradient,) = torch.autograd.grad(result.sum(), q, create_graph=True)
                    assert (said(gradient.sum().backward) is not None) == refuses

    @pytest.mark.parametrize("shape", [(65_536, 1, 1, 8), (1, 65_536, 1, 8)])
    def test_more_batches_or_heads_than_a_grid_has(
        self, native: Any, shape: tuple[int, ...]
    ) -> None:
        with torchdevice.simulate("a100", native=native):
            q = torch.zeros(shape, device="cuda", dtype=torch.float16, requires_grad=True)
            for given in (q.detach(), q):
                with pytest.raises(RuntimeError, match=r"^CUDA error: invalid"):
                    F.scaled_dot_product_attention(given, given, given)

    def test_the_transforms_of_functorch(self, native: Any) -> None:
        def loss(x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x).pow(2).sum()

        torch.manual_seed(0)
        x = torch.randn(1, 2, 8, 16)
        with torchdevice.simulate(native=native):
            y = x.to("cuda").requires_grad_()
            found = torch.func.grad(loss)(y.detach()).cpu()
            rows = torch.func.vmap(lambda factor: loss(y) * factor)(torch.ones(3, device="cuda"))
            assert rows.requires_grad
            (gradient,) = torch.autograd.grad(rows.sum(), y)
        torch.testing.assert_close(found, torch.func.grad(loss)(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient.cpu(), 3 * found, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        "transform", [torch.func.hessian, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))]
    )
    def test_forward_mode_is_refused_in_the_name_of_the_devices_kernel(
        self, native: Any, transform: Any
    ) -> None:
        with torchdevice.simulate(native=native):
            x = torch.randn(1, 2, 8, 16, device="cuda")
            with pytest.raises(
                NotImplementedError,
                match="with _scaled_dot_product_efficient_attention that does not",
            ):
                transform(lambda each: F.scaled_dot_product_attention(each, each, each).sum())(x)
