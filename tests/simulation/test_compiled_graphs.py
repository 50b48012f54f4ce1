"""``torch.compile`` on simulated devices: Inductor's code for the CPU, or operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.exc

import torchdevice
from torchdevice.errors import FidelityError
from torchdevice.simulation import inductor


@pytest.mark.parametrize("profile", ["cuda", "mps"])
def test_what_is_not_compiled_runs_and_is_reported(profile: str) -> None:
    functions: dict[str, tuple[Callable[..., Any], str]] = {
        "two generators": (
            lambda x: x * 2 + torch.rand_like(x).floor() + torch.rand_like(x.cpu()).floor().cuda(),
            "draws random numbers on cpu and simulated:0",
        )
    }
    if profile == "mps":
        functions = {"anything": (lambda x: (x * 2).sin(), "makes no code for 'simulated:mps'")}
    for name, (function, reason) in functions.items():
        torch._dynamo.reset()
        with torchdevice.simulate(profile) as scope:
            x = torch.eye(3, device="cuda") + 1
            found = torch.compile(function)(x)
            assert torch.equal(found, function(x)), name
        reports = [entry for entry in scope.journal.degraded if "inductor" in entry.requested]
        assert reports and all(reason in entry.done for entry in reports), (name, reports)
        torch._dynamo.reset()
        with (
            torchdevice.simulate(profile, strict=True),
            pytest.raises(Exception, match="inductor") as caught,
        ):
            torch.compile(function)(torch.eye(3, device="cuda"))
        assert isinstance(caught.value, FidelityError) or "GraphRefusedError" in repr(
            caught.value
        ), name
    torch._dynamo.reset()


def _trained(model: torch.nn.Module, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [each.detach().cpu() for each in (*losses, *model.parameters())]


def _compiled_training() -> None:
    """Forward and backward are Inductor's code, equal to its code for the CPU to the bit."""

    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    on_cpu = _trained(torch.compile(model()), x)
    torch._dynamo.reset()
    with torchdevice.simulate(count=2) as scope:
        eager = _trained(model().to("cuda:1"), x.to("cuda:1"))
        torch._dynamo.utils.counters.clear()
        compiled = _trained(torch.compile(model().to("cuda:1")), x.to("cuda:1"))
        counted = torch._dynamo.utils.counters["inductor"]
        assert counted["fxgraph_cache_hit"] + counted["fxgraph_cache_miss"] >= 2, counted
    torch._dynamo.reset()
    assert not scope.journal.degraded
    for one, other, plain in zip(compiled, on_cpu, eager, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, plain)


def _compiled_aliases_and_draws() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        made = torch.arange(4, device="cuda") + y.sum()
        return x, y.t() * 2, y.view(-1), made, torch.nn.functional.dropout(made, 0.5, True)

    compiled = torch.compile(function, fullgraph=True)
    outcomes = []
    with torchdevice.simulate():
        for call in (function, compiled, compiled):
            x, y = torch.ones(3, device="cuda"), torch.arange(6.0, device="cuda").reshape(2, 3)
            torch.cuda.manual_seed(1)
            before = x._version
            results = call(x, y)
            assert results[0] is x and x._version > before and x.tolist() == [2, 2, 2]
            assert results[2].untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
            assert all(each.is_cuda for each in results)
            outcomes.append([each.cpu() for each in results])
        memory = torch.cuda.memory_allocated()
        kept = compiled(x, y)[3]
        assert torch.cuda.memory_allocated() - memory == 512 and kept.nbytes <= 512
    torch._dynamo.reset()
    for plain, one, other in zip(*outcomes, strict=True):
        assert plain.stride() == one.stride() == other.stride() and torch.equal(one, other), (
            "a seed gives its numbers"
        )
    for plain, one in zip(outcomes[0][:4], outcomes[1][:4], strict=True):
        assert torch.equal(plain, one)


def _compiled_code_in_a_cuda_graph() -> None:
    compiled = torch.compile(lambda x: (x * 2).sin())
    with torchdevice.simulate():
        x = torch.ones(3, device="cuda")
        compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        x.fill_(2)
        graph.replay()
        assert torch.equal(y, (x * 2).sin())
    torch._dynamo.reset()


@pytest.mark.one_engine
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "check", [_compiled_training, _compiled_aliases_and_draws, _compiled_code_in_a_cuda_graph]
)
def test_compiled_code(check: Callable[[], None]) -> None:
    check()


class WithConstant(torch.nn.Module):
    """Adds a constant, which is no parameter, and ones that it makes on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.constant, self.number = torch.arange(3.0, device="cuda"), 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            + self.constant
            + torch.ops.aten.ones.default([3], device=torch.device("simulated", 0))
        )


class TestGraphsForInductor:
    def test_a_graph_is_copied_for_cpu_tensors(self) -> None:
        from torch._subclasses import FakeTensorMode

        with torchdevice.simulate():
            gm = torch.fx.symbolic_trace(WithConstant())
            gm.meta["kept"] = True
            with torch._C.DisableTorchFunction():
                example = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(
                    torch.ones(3, device="simulated")
                )
                own = inductor._example(example)
                assert own.device.type == "cpu" and own.shape == (3,) and inductor._example(7) == 7
                copied = inductor._for_cpu(gm, [own])
                assert copied(torch.zeros(3)).tolist() == [1, 2, 3] and copied.meta["kept"]
                gm.constant.fill_(5)
                assert copied(torch.zeros(3)).tolist() == [6, 6, 6], (
                    "the constant has the device's memory"
                )
                assert gm(torch.zeros(3, device="simulated")).device.type == "simulated"

    def test_what_cannot_be_compiled_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import cpp_builder

        def refuse() -> None:
            raise FileNotFoundError("g++")

        monkeypatch.setattr(cpp_builder, "get_cpp_compiler", refuse)
        with torchdevice.simulate():
            gm = torch.fx.symbolic_trace(WithConstant())
            inductor._missing_compiler.cache_clear()
            try:
                assert inductor.obstacle(gm) == "there is no C++ compiler (FileNotFoundError)"
            finally:
                inductor._missing_compiler.cache_clear()


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(torch.float32)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiler")
class TestCapability:
    """What Inductor and Triton refuse of a GPU's capability."""

    def test_bfloat16_on_a_gpu_without_its_instructions_runs_by_operators(self) -> None:
        with (
            torchdevice.simulate("t4"),
            pytest.warns(UserWarning, match=r"^Tesla T4 does not support bfloat16 comp"),
        ):
            result = torch.compile(_doubled)(torch.ones(8, device="cuda", dtype=torch.bfloat16))
        assert result.dtype is torch.bfloat16 and result.sum().item() == 16

    @pytest.mark.parametrize(("gpu", "dtype"), [("t4", torch.float16), ("a100", torch.bfloat16)])
    def test_other_halves_are_compiled(self, gpu: str, dtype: torch.dtype) -> None:
        with torchdevice.simulate(gpu), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*does not support bfloat16")
            assert (
                torch.compile(_doubled)(torch.ones(8, device="cuda", dtype=dtype)).sum().item()
                == 16
            )

    def test_a_cast_to_float8_needs_a_gpu_that_has_it(self) -> None:
        text = "type fp8e4nv not supported in this architecture"
        with (
            torchdevice.simulate("a100"),
            pytest.raises(torch._inductor.exc.InductorError, match=text),
        ):
            torch.compile(_rounded)(torch.ones(8, device="cuda"))
        torch._dynamo.reset()
        for gpu in ("h100", "l4"):
            with torchdevice.simulate(gpu):
                assert torch.compile(_rounded)(torch.ones(8, device="cuda")).sum().item() == 8
        with torchdevice.simulate("a100"):
            assert _rounded(torch.ones(8, device="cuda")).sum().item() == 8, (
                "without a compiler every GPU casts"
            )
