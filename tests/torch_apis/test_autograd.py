"""CUDA spellings in code of the program that the autograd engine calls."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import torchdevice

pytestmark = pytest.mark.usefixtures("cuda")


def spelled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged, after CUDA spellings that fail without a scope."""
    assert torch.cuda.is_available() and torch.cuda.current_device() == 0
    return tensor.cuda() + torch.zeros(1, device="cuda") + torch.zeros(1).to("cuda:0")


class Spelled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return spelled(x) ** 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return spelled(grad * 2 * x)


def leaf() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0], device="cuda", requires_grad=True)


@pytest.mark.parametrize("way", ["Tensor.backward", "autograd.backward", "autograd.grad"])
class TestEngine:
    def differentiate(self, way: str, loss: torch.Tensor, x: torch.Tensor) -> list[float]:
        if way == "autograd.grad":
            return torch.autograd.grad(loss, x)[0].tolist()
        loss.backward() if way == "Tensor.backward" else torch.autograd.backward(loss)
        assert x.grad is not None
        return x.grad.tolist()

    def test_custom_function(self, way: str) -> None:
        x = leaf()
        assert self.differentiate(way, Spelled.apply(x).sum(), x) == [2.0, 4.0, 6.0]

    def test_tensor_hook(self, way: str) -> None:
        x = leaf()
        x.register_hook(lambda grad: spelled(grad) * 10)
        assert self.differentiate(way, x.sum(), x) == [10.0] * 3

    def test_hook_on_an_intermediate(self, way: str) -> None:
        x = leaf()
        y = x * 2
        y.register_hook(lambda grad: spelled(grad) * 5)
        assert self.differentiate(way, y.sum(), x) == [10.0] * 3

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoint(self, way: str, reentrant: bool) -> None:
        if reentrant and way == "autograd.grad":
            pytest.skip("torch refuses reentrant checkpointing under autograd.grad")
        x = leaf()
        y = checkpoint(lambda t: spelled(t).sin() * t, x, use_reentrant=reentrant)
        expected = (x.detach().sin() + x.detach() * x.detach().cos()).tolist()
        assert self.differentiate(way, y.sum(), x) == pytest.approx(expected)

    def test_unpack_hooks(self, way: str) -> None:
        x = leaf()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.cpu(), lambda t: spelled(t.cuda())
        ):
            y = (x * x).sum()
        assert self.differentiate(way, y, x) == [2.0, 4.0, 6.0]

    def test_save_on_cpu(self, way: str) -> None:
        x = leaf()
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            y = (x * x).sum()
        assert self.differentiate(way, y, x) == [2.0, 4.0, 6.0]


def test_torch_knows_the_hooks_of_its_selective_checkpoints() -> None:
    """It warns of others, and warnings are errors here."""
    x = leaf()
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mul.Tensor])
    y = checkpoint(lambda t: (t * t).sin(), x, use_reentrant=False, context_fn=kept)
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach() * (x.detach() ** 2).cos())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_reproduces_dropout(reentrant: bool) -> None:
    x = torch.ones(64, device="cuda", requires_grad=True)
    torch.manual_seed(0)
    y = checkpoint(
        lambda t: torch.nn.functional.dropout(spelled(t), 0.5), x, use_reentrant=reentrant
    )
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_checkpoint_under_autocast_recomputes_in_the_same_dtype(kind: str) -> None:
    layer = torch.nn.Linear(4, 4).cuda()
    seen: list[torch.dtype] = []

    def block(t: torch.Tensor) -> torch.Tensor:
        out = layer(t)
        seen.append(out.dtype)
        return out

    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    with (
        torch.autocast("cuda", dtype=torch.float16),
        torch.utils.checkpoint.set_checkpoint_early_stop(False),
    ):
        y = checkpoint(block, x, use_reentrant=False)
    y.float().sum().backward()
    first, again = seen
    assert first is again and first in (
        (torch.bfloat16, torch.float32) if kind == "cpu" else (torch.float16,)
    )


def test_checkpoint_sequential() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4))).cuda()
    x = leaf()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def test_module_hooks() -> None:
    module = torch.nn.Linear(3, 3, device="cuda")
    called: list[str] = []
    module.register_full_backward_hook(
        lambda *_: called.append("backward") or (spelled(torch.ones(1)) and None)
    )
    module.register_forward_hook(
        lambda *_: called.append("forward") or (spelled(torch.ones(1)) and None)
    )
    module(torch.ones(2, 3, device="cuda", requires_grad=True)).sum().backward()
    assert called == ["forward", "backward"]


def test_double_backward() -> None:
    x = leaf()
    (first,) = torch.autograd.grad((spelled(x) ** 3).sum(), x, create_graph=True)
    first.register_hook(spelled)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [6.0, 12.0, 18.0]


def test_backward_in_a_backward() -> None:
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y = leaf()
                spelled(y).square().sum().backward()
            return spelled(grad)

    x = leaf()
    Nested.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1.0] * 3


def test_function_transforms() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], device="cuda")

    def f(t: torch.Tensor) -> torch.Tensor:
        return (spelled(t) ** 2).sum()

    assert torch.func.grad(f)(x).tolist() == [2.0, 4.0, 6.0]
    assert torch.func.vmap(lambda t: spelled(t).sum())(x[None].repeat(2, 1)).tolist() == [6.0, 6.0]
    assert torch.func.jacrev(lambda t: spelled(t) * 2)(x).diagonal().tolist() == [2.0] * 3
    assert torch.func.hessian(f)(x).diagonal().tolist() == [2.0] * 3
    assert torch.func.jvp(f, (x,), (torch.ones(3, device="cuda"),))[1].item() == 12.0
    model = torch.nn.Linear(3, 1).cuda()
    out = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    assert out.shape == (1,)


class Transformed(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return spelled(x) * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.factor = spelled(torch.tensor(inputs[1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return spelled(grad) * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:  # type: ignore[override]
        return spelled(tangent) * ctx.factor


class TransformedInBatches(Transformed):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, Any]:
        return spelled(x) * factor, in_dims[0]


class TransformedByRule(Transformed):
    generate_vmap_rule = True


@pytest.mark.parametrize("function", [Transformed, TransformedInBatches, TransformedByRule])
def test_custom_functions_under_transforms(function: Any) -> None:
    """Torch calls their Python while it handles a torch function of its own."""
    x = torch.tensor([1.0, 2.0, 3.0], device="cuda")

    def f(t: torch.Tensor) -> torch.Tensor:
        return (function.apply(t, 3.0) ** 2).sum()

    assert torch.func.grad(f)(x).tolist() == [18.0, 36.0, 54.0]
    assert torch.func.grad(lambda t: torch.func.grad(f)(t).sum())(x).tolist() == [18.0] * 3
    assert torch.func.jvp(f, (x,), (torch.ones_like(x),))[1].item() == 108.0
    rows = x[None].repeat(2, 1)
    if function is Transformed:
        with pytest.raises(RuntimeError, match="does not have vmap support"):
            torch.func.vmap(f)(rows)
    else:
        assert torch.func.vmap(f)(rows).tolist() == [126.0] * 2
        assert torch.func.vmap(torch.func.grad(f))(rows).tolist() == [[18.0, 36.0, 54.0]] * 2


def test_python_kernel_of_a_custom_operator() -> None:
    @torch.library.custom_op("torchdevice_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return spelled(x) * 3

    @scaled.register_kernel("cuda")
    def _(x: torch.Tensor) -> torch.Tensor:
        return spelled(x) * 4

    scaled.register_autograd(lambda ctx, grad: spelled(grad) * 3)
    x = leaf()
    result = scaled(x)
    assert torch.equal(result, x * 4)
    result.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3.0] * 3


def test_inference_mode_and_anomaly_detection() -> None:
    with torch.inference_mode():
        assert torch.ones(2, device="cuda").is_inference()
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="nan"):
        x = leaf()
        (x * float("nan")).sqrt().sum().backward()


def test_programs_that_call_the_engine_themselves(cuda: torchdevice.Scope) -> None:
    """As Megatron's pipelines do: custom functions run on the calling thread, in the scope."""

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            threads.append(threading.current_thread())
            return gradient * torch.arange(2, device="cuda")

    threads: list[threading.Thread] = []
    engine: Any = torch.autograd.Variable._execution_engine
    names = (
        "tensors",
        "grad_tensors",
        "keep_graph",
        "create_graph",
        "inputs",
        "allow_unreachable",
        "accumulate_grad",
    )
    for by_name in (False, True):
        x = torch.ones(2, device="cuda", requires_grad=True)
        result = Counted.apply(x)
        given = (result,), (torch.ones_like(result),), False, False, (), True, True
        engine.run_backward(
            **dict(zip(names, given, strict=True))
        ) if by_name else engine.run_backward(*given)
        assert x.grad is not None and x.grad.tolist() == [0, 1]
    assert threads == [threading.current_thread()] * 2
