"""Products of halves, computed in float32 on a CPU without instructions for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchdevice
from torchdevice.calls.lacking import half_precision_matmul
from torchdevice.errors import FidelityError
from torchdevice.kernel.devices import cpu

ENGINES = ("mode", "wrap")
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(params=ENGINES)
def scope(request: pytest.FixtureRequest) -> Iterator[torchdevice.Scope]:
    torch._dynamo.reset()
    with torchdevice.portable("cpu", engine=request.param, half_products="float32") as entered:
        yield entered


def reports(scope: torchdevice.Scope) -> int:
    return sum(
        entry.count for entry in scope.journal.entries if entry.requested.startswith("a product of")
    )


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / 8


def _at(owner: Any, name: str) -> Callable[..., Any]:
    """Return a function that looks torch's up when it is called."""
    return lambda *operands: getattr(owner, name)(*operands)


def _rnn(kind: str) -> Callable[..., Any]:
    """Return a function of an input, a state and the parameters of a layer of that kind."""

    def layer(x: torch.Tensor, h: torch.Tensor, *parameters: torch.Tensor) -> Any:
        state: Any = (h, h) if kind == "lstm" else h
        return getattr(torch, kind)(x, state, list(parameters), True, 1, 0.0, False, False, False)

    return layer


def _cell(kind: str) -> Callable[..., Any]:
    def cell(x: torch.Tensor, h: torch.Tensor, *parameters: torch.Tensor) -> Any:
        return getattr(torch, kind)(x, (h, h) if kind.startswith("lstm") else h, *parameters)

    return cell


def _adding(name: str) -> Callable[..., Any]:
    return lambda total, *factors: getattr(total.clone(), name)(*factors)


def _multi_head(
    q: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
) -> Any:
    zeros = torch.zeros(64, dtype=q.dtype)
    given = (weight, bias, None, None, False, 0.0, out, zeros)
    return F.multi_head_attention_forward(q, q, q, 64, 4, *given)


def _native_multi_head(
    q: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
) -> Any:
    zeros = torch.zeros(64, dtype=q.dtype)
    return torch._native_multi_head_attention(
        q, q, q, 64, 4, weight, bias, out, zeros, need_weights=False
    )


def _encoder_layer(
    q: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
) -> Any:
    zeros, ones = torch.zeros(64, dtype=q.dtype), torch.ones(64, dtype=q.dtype)
    norm = (1e-5, ones, zeros, ones, zeros)
    return torch._transformer_encoder_layer_fwd(
        q, 64, 4, weight, bias, out, zeros, True, False, *norm, out, zeros, out, zeros
    )


_SQUARES = ((64, 64), (64, 64))
_BATCHES = ((2, 64, 64), (2, 64, 64))
_PACKED = ((3, 16, 64), (192, 64), (192,), (64, 64))


def _gated(gates: int) -> tuple[tuple[int, ...], ...]:
    return ((gates * 64, 64), (gates * 64, 64), (gates * 64,), (gates * 64,))


_SUMS = {
    "addmm": ((64, 64), *_SQUARES),
    "baddbmm": ((2, 64, 64), *_BATCHES),
    "addbmm": ((64, 64), *_BATCHES),
}
_LAYERS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (_at(F, "linear"), (*_SQUARES, (64,))),
    "matmul": (_at(torch, "matmul"), _SQUARES),
    "Tensor.matmul": (_at(torch.Tensor, "matmul"), _BATCHES),
    "Tensor.__matmul__": (lambda a, b: a @ b, ((3, 16, 64), (64, 64))),
    "Tensor.__rmatmul__": (lambda a, b: torch.Tensor.__rmatmul__(b, a), _SQUARES),
    "mm": (_at(torch, "mm"), _SQUARES),
    "Tensor.mm": (_at(torch.Tensor, "mm"), _SQUARES),
    "bmm": (_at(torch, "bmm"), _BATCHES),
    "Tensor.bmm": (_at(torch.Tensor, "bmm"), _BATCHES),
    "inner": (_at(torch, "inner"), _SQUARES),
    "Tensor.inner": (_at(torch.Tensor, "inner"), _SQUARES),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), _SQUARES),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), _SQUARES),
    "einsum of a list": (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), _SQUARES),
    "bilinear": (_at(F, "bilinear"), ((64, 16), (64, 16), (16, 16, 16))),
    "chain_matmul": (_at(torch, "chain_matmul"), (*_SQUARES, (64, 64))),
    "linalg.matmul": (_at(torch.linalg, "matmul"), _SQUARES),
    "linalg.multi_dot": (lambda *each: torch.linalg.multi_dot(each), (*_SQUARES, (64, 64))),
    "conv_tbc": (_at(torch, "conv_tbc"), ((16, 4, 64), (3, 64, 64), (64,))),
    "convolution": (
        lambda x, w: torch.convolution(x, w, None, [1], [0], [1], False, [0], 1),
        ((2, 32, 64), (32, 32, 3)),
    ),
    "scaled_dot_product_attention": (_at(F, "scaled_dot_product_attention"), ((1, 2, 32, 64),) * 3),
    "multi_head_attention_forward": (_multi_head, _PACKED),
    "_native_multi_head_attention": (_native_multi_head, _PACKED),
    "_transformer_encoder_layer_fwd": (_encoder_layer, _PACKED),
    **{name: (_at(torch, name), shapes) for name, shapes in _SUMS.items()},
    **{f"Tensor.{name}": (_at(torch.Tensor, name), shapes) for name, shapes in _SUMS.items()},
    **{f"Tensor.{name}_": (_adding(f"{name}_"), shapes) for name, shapes in _SUMS.items()},
    **{
        f"conv{n}d": (_at(F, f"conv{n}d"), ((2, 16, *(8,) * n), (16, 16, *(3,) * n)))
        for n in (2, 3)
    },
    "conv1d": (_at(F, "conv1d"), ((2, 32, 64), (32, 32, 3))),
    **{
        f"conv_transpose{n}d": (
            _at(F, f"conv_transpose{n}d"),
            ((2, 16, *(8,) * n), (16, 16, *(3,) * n)),
        )
        for n in (2, 3)
    },
    "conv_transpose1d": (_at(F, "conv_transpose1d"), ((2, 32, 64), (32, 32, 3))),
    **{
        kind: (_rnn(kind), ((5, 2, 64), (1, 2, 64), *_gated(gates)))
        for kind, gates in _LAYERS.items()
    },
    **{
        f"{kind}_cell": (_cell(f"{kind}_cell"), ((2, 64), (2, 64), *_gated(n)))
        for kind, n in _LAYERS.items()
    },
}

FOR_INFERENCE = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd"}
"""Functions that autograd does not differentiate."""


def flat(result: Any) -> list[torch.Tensor]:
    return [
        each for each in torch.utils._pytree.tree_leaves(result) if isinstance(each, torch.Tensor)
    ]


class TestEveryProduct:
    def test_every_function_with_a_rewriter_has_a_case(self) -> None:
        covered = {name.removeprefix("Tensor.").split()[0] for name in CASES}
        assert {
            function.__name__.replace("linalg_", "linalg.")
            for function in half_precision_matmul.TABLE
        } == covered

    @pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("name", CASES)
    def test_it_is_the_float32_product_rounded_once(
        self, scope: torchdevice.Scope, name: str, dtype: Any
    ) -> None:
        function, shapes = CASES[name]
        differentiated = name not in FOR_INFERENCE
        operands = [values(*shape).to(dtype).requires_grad_(differentiated) for shape in shapes]
        wide = [operand.detach().float().requires_grad_(differentiated) for operand in operands]
        with torch.set_grad_enabled(differentiated):
            found, expected = flat(function(*operands)), flat(function(*wide))
        assert reports(scope) == 1
        for one, other in zip(found, expected, strict=True):
            assert one.dtype is dtype and torch.equal(one, other.to(dtype))
        if differentiated:
            gradients = torch.autograd.grad(sum(each.float().sum() for each in found), operands)
            exact = torch.autograd.grad(sum(each.sum() for each in expected), wide)
            for gradient, other in zip(gradients, exact, strict=True):
                torch.testing.assert_close(gradient, other.to(dtype), rtol=0.02, atol=0.02)

    @pytest.mark.parametrize(
        "name",
        [*("linear", "matmul", "einsum", "addmm", "bmm", "conv2d"), "scaled_dot_product_attention"],
    )
    def test_compiled(self, scope: torchdevice.Scope, name: str) -> None:
        function, shapes = CASES[name]
        operands = [values(*shape).half().requires_grad_() for shape in shapes]
        compiled = torch.compile(lambda *each: function(*each), backend="aot_eager", fullgraph=True)
        found = compiled(*operands)
        assert found.dtype is torch.float16 and reports(scope) == 1
        assert torch.equal(found, function(*(operand.float() for operand in operands)).half())
        found.float().sum().backward()
        assert operands[0].grad is not None and operands[0].grad.dtype is torch.float16


class TestArguments:
    def test_operands_by_keyword(self, scope: torchdevice.Scope) -> None:
        x, w = values(64, 64).half(), values(64, 64).half()
        assert torch.equal(F.linear(input=x, weight=w), F.linear(x.float(), w.float()).half())
        assert reports(scope) == 1

    @pytest.mark.parametrize("shape", [(64, 64), (0,)])
    def test_out(self, scope: torchdevice.Scope, shape: tuple[int, ...]) -> None:
        x, out = values(64, 64).half(), torch.empty(shape, dtype=torch.float16)
        assert torch.mm(x, x, out=out) is out and torch.equal(
            out, torch.mm(x.float(), x.float()).half()
        )

    def test_in_place_it_returns_its_first_argument(self, scope: torchdevice.Scope) -> None:
        x, total = values(64, 64).half(), values(64, 64).half()
        expected = total.float().addmm(x.float(), x.float(), alpha=2.0).half()
        assert total.addmm_(x, x, alpha=2.0) is total and torch.equal(total, expected)

    def test_under_vmap(self, scope: torchdevice.Scope) -> None:
        x, w = values(3, 16, 64).half(), values(64, 64).half()
        assert torch.equal(torch.vmap(lambda each: each @ w)(x), (x.float() @ w.float()).half())

    def test_second_derivatives(self, scope: torchdevice.Scope) -> None:
        x = values(64, 64).bfloat16().requires_grad_()
        (first,) = torch.autograd.grad((x @ x).float().square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().sum(), x)
        assert first.dtype is second.dtype is torch.bfloat16 and bool(second.isfinite().all())


class TestLeftToTorch:
    @pytest.fixture(autouse=True)
    def nothing_is_reported(self, scope: torchdevice.Scope) -> Iterator[None]:
        yield
        assert reports(scope) == 0

    def test_operands_of_two_dtypes_raise_torchs_error(self, scope: torchdevice.Scope) -> None:
        x = values(64, 64)
        for one, other in ((x.half(), x), (x, x.half()), (x.half(), x.bfloat16())):
            with pytest.raises(RuntimeError, match="same dtype"):
                torch.matmul(one, other)

    def test_small_products(self, scope: torchdevice.Scope) -> None:
        x = values(8, 8).half()
        assert (x @ x).dtype is torch.float16

    def test_one_row_by_the_weight_of_a_layer(self, scope: torchdevice.Scope) -> None:
        layer = torch.nn.Linear(128, 128).half().to("cuda")
        x = values(1, 128).half()
        with torch.no_grad():
            assert layer(x).dtype is (x @ layer.weight.t()).dtype is torch.float16

    def test_attention_for_inference(self, scope: torchdevice.Scope) -> None:
        q = values(1, 2, 64, 64).half()
        assert F.scaled_dot_product_attention(q, q, q, is_causal=True).dtype is torch.float16

    def test_products_in_autocast(self, scope: torchdevice.Scope) -> None:
        x = values(64, 64).half()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x @ x

    def test_other_classes_of_tensors(self, scope: torchdevice.Scope) -> None:
        class Own(torch.Tensor):
            pass

        x = values(64, 64).half().as_subclass(Own)
        assert type(x @ x) is Own

    def test_sparse_tensors(self, scope: torchdevice.Scope) -> None:
        x = torch.eye(64).to_sparse()
        assert (x @ values(64, 64)).dtype is torch.float32


def test_each_line_is_reported_once(scope: torchdevice.Scope) -> None:
    x = values(64, 64).half()
    for _ in range(3):
        x @ x
    (entry,) = [
        entry for entry in scope.journal.entries if entry.requested.startswith("a product of")
    ]
    assert (entry.requested, entry.count) == ("a product of torch.float16 tensors", 3)
    assert entry.done == "computed in float32 and rounded once" and entry.site.file == __file__


def test_a_strict_scope_computes_them_too() -> None:
    x = values(64, 64).half()
    with torchdevice.portable("cpu", strict=True, half_products="float32") as scope:
        x @ x
    assert reports(scope) == 1


class TestChoice:
    """The option, and what a CPU has."""

    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize("option", ["auto", "float32", "target"])
    @pytest.mark.parametrize("lacking", [(), (torch.float16,), HALF])
    def test_which_dtypes_are_computed_in_float32(
        self, monkeypatch: pytest.MonkeyPatch, option: Any, lacking: Any, engine: Any
    ) -> None:
        monkeypatch.setattr(cpu, "computes_in_float16", lambda: torch.float16 not in lacking)
        monkeypatch.setattr(cpu, "computes_in_bfloat16", lambda: torch.bfloat16 not in lacking)
        expected = {"auto": set(lacking), "float32": set(HALF), "target": set()}[option]
        x = values(64, 64)
        for dtype in HALF:
            with torchdevice.portable("cpu", half_products=option, engine=engine) as scope:
                x.to(dtype) @ x.to(dtype)
            assert reports(scope) == (dtype in expected)

    def test_nothing_is_wrapped_where_nothing_is_computed_in_float32(self) -> None:
        product, linear = torch.matmul, F.linear
        with torchdevice.portable("cpu", engine="wrap", half_products="target"):
            assert torch.matmul is product and F.linear is linear
        with torchdevice.portable("cpu", engine="wrap", half_products="float32"):
            assert torch.matmul is not product and torch.matmul == product and F.linear == linear
        assert torch.matmul is product and F.linear is linear

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_simulated_device_computes_as_a_gpu_does(self, engine: Any) -> None:
        with torchdevice.simulate(engine=engine, half_products="float32") as scope:
            x = values(64, 64).half().cuda()
            assert (x @ x).dtype is torch.float16
        assert reports(scope) == 0

    @pytest.mark.parametrize("engine", ENGINES)
    def test_nested_scopes_have_their_own(self, engine: Any) -> None:
        x = values(64, 64).half()
        with torchdevice.portable("cpu", engine=engine, half_products="target") as outer:
            x @ x
            with torchdevice.portable("cpu", engine=engine, half_products="float32") as inner:
                x @ x
            x @ x
        assert (reports(outer), reports(inner)) == (0, 1)

    @pytest.mark.parametrize("requested", HALF)
    @pytest.mark.parametrize("option", ["auto", "bfloat16", "float32"])
    @pytest.mark.parametrize("has_instructions", [True, False])
    def test_what_autocast_computes_in(
        self,
        monkeypatch: pytest.MonkeyPatch,
        requested: torch.dtype,
        option: Any,
        has_instructions: bool,
    ) -> None:
        monkeypatch.setattr(cpu, "computes_in_bfloat16", lambda: has_instructions)
        name = option if option != "auto" else "bfloat16" if has_instructions else "float32"
        x = values(4, 4)
        with torchdevice.portable("cpu", autocast=option), torch.autocast("cuda", dtype=requested):
            assert (x @ x).dtype is getattr(torch, name)
        with torchdevice.portable("cpu", autocast=option, strict=True):
            if name == str(requested).removeprefix("torch."):
                with torch.autocast("cuda", dtype=requested):
                    assert (x @ x).dtype is requested
            else:
                with (
                    pytest.raises(FidelityError, match=str(requested)),
                    torch.autocast("cuda", dtype=requested),
                ):
                    pass
