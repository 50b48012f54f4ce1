"""Ways to TorchInductor and contents of its graphs, compared with the CPU's compiled code."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import aot_function
from processes import run_program
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._higher_order_ops.while_loop import while_loop
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchdevice

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ENGINES = ("mode", "wrap")


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu() * 2 + torch.ones(3, device=x.device)


def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    x, w = torch.randn(4, 5, generator=numbers), torch.randn(5, 3, generator=numbers)
    return x.to(device).requires_grad_(), w.to(device).requires_grad_()


def trained(compiled: Any, device: str) -> Any:
    x, w = inputs(device)
    result = compiled(x, w)
    result.sum().backward()
    return result.detach(), x.grad, w.grad


def traced(device: str) -> Any:
    given = [each.detach() for each in inputs(device)]
    return make_fx(lambda x, w: (step(x, w),))(*given), given


def by_aot(device: str) -> Any:
    backend = aot_autograd(fw_compiler=compile_fx_inner, decompositions=select_decomp_table())
    return trained(torch.compile(step, backend=backend), device)


def by_hand(device: str) -> Any:
    lowered = aot_function(
        lambda x, w: (x @ w).relu() * 2,
        fw_compiler=lambda gm, given: compile_fx_inner(gm, given),
        decompositions=select_decomp_table(),
    )
    return trained(lowered, device)


def by_inductor_compile(device: str) -> Any:
    gm, given = traced(device)
    return torch._inductor.compile(gm, given)(*given)


def ahead_of_time(device: str) -> Any:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(5, 3).eval().to(device), torch.ones(4, 5).to(device)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=f"{folder}/model.pt2"
        )
        result = torch._inductor.aoti_load_package(path)(x)
    assert result.device == x.device
    return result


def frozen(device: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU()).eval().to(device)
    with torch.no_grad():
        return torch.compile(model, options={"freezing": True})(torch.ones(2, 5).to(device))


def by_compiled_autograd(device: str) -> Any:
    def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = step(x, w)
        result.sum().backward()
        return result

    x, w = inputs(device)
    with torch._dynamo.config.patch(compiled_autograd=True):
        result = torch.compile(whole)(x, w)
    return result.detach(), x.grad, w.grad


def by_compiled_backward(device: str) -> Any:
    with compiled_autograd._enable(torch.compile(backend="inductor")):
        return trained(step, device)


def placed(device: str) -> Any:
    x, source = torch.zeros(4, 5).to(device), torch.arange(20.0).to(device)
    mask = (torch.arange(20).view(4, 5) % 3 == 0).to(device)
    return torch.compile(lambda x: x.masked_scatter(mask, source) + 1)(x)


def on_two_devices(device: str) -> Any:
    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        here = x.clone() if x.device == y.device else x.cpu()
        here.add_(1)
        return here + y, x.sin(), y.to(x.device)

    x, y = torch.arange(5.0).to(device), torch.ones(5)
    results = torch.compile(both)(x, y)
    assert [each.device for each in results] == [y.device, x.device, x.device]
    return *results, x


def on_two_gpus(device: str) -> Any:
    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x * 2).to(y.device) + y, x.to(y.device), x.sin(), torch.rand_like(y)

    x, y = torch.arange(5.0).to(device), torch.ones(5).to("cpu" if device == "cpu" else "cuda:1")
    results = torch.compile(both)(x, y)
    assert [each.device for each in results] == [y.device, y.device, x.device, y.device]
    return results[:3]


def branching(device: str) -> Any:
    def either(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) + 1

    return torch.compile(either)(torch.arange(5.0).to(device))


def looping(device: str) -> Any:
    def loop(x: torch.Tensor) -> Any:
        count = torch.zeros((), dtype=torch.int64, device=x.device)
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (count, x))

    return torch.compile(loop)(torch.ones(3).to(device))


def in_two_regions(device: str) -> Any:
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"), torch.autocast(device, dtype=torch.bfloat16):
            return x @ w

    return torch.compile(product)(*inputs(device)).detach()


def attending(device: str) -> Any:
    query = torch.randn(1, 2, 128, 16, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        return torch.compile(flex_attention)(query, query, query)


def writing(device: str) -> Any:
    def write(x: torch.Tensor, w: torch.Tensor) -> Any:
        x.add_(1)
        w.mul_(x.sum())
        return x.view(-1)[:2], w

    x, w = (each.detach() for each in inputs(device))
    return *torch.compile(write)(x, w), x, w


def drawing(device: str) -> Any:
    torch.manual_seed(1)
    draw = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5, True) + torch.rand_like(x))
    return draw(torch.ones(9).to(device)), torch.rand(3, device=device)


WAYS: dict[str, Callable[[str], Any]] = {
    "backend=compile_fx": lambda device: trained(torch.compile(step, backend=compile_fx), device),
    "a backend that calls compile_fx": lambda device: trained(
        torch.compile(step, backend=lambda gm, given: compile_fx(gm, given)), device
    ),
    "a backend that looks Inductor up": lambda device: trained(
        torch.compile(step, backend=lambda gm, given: lookup_backend("inductor")(gm, given)), device
    ),
    "_dynamo.optimize": lambda device: trained(torch._dynamo.optimize("inductor")(step), device),
    "_inductor.compile": by_inductor_compile,
    "aot_autograd": by_aot,
    "aot_function": by_hand,
    "AOTInductor": ahead_of_time,
    "freezing": frozen,
    "compiled autograd": by_compiled_autograd,
    "compiled backward": by_compiled_backward,
    "max-autotune": lambda device: trained(torch.compile(step, mode="max-autotune"), device),
    "reduce-overhead": lambda device: trained(torch.compile(step, mode="reduce-overhead"), device),
    "cpp_wrapper": lambda device: trained(
        torch.compile(step, options={"cpp_wrapper": True}), device
    ),
    "checkpoint": lambda device: trained(
        torch.compile(lambda x, w: checkpoint(step, x, w, use_reentrant=False)), device
    ),
    "masked_scatter": placed,
    "two devices": on_two_devices,
    "two GPUs": on_two_gpus,
    "cond": branching,
    "while_loop": looping,
    "autocast of the CPU and of CUDA": in_two_regions,
    "flex_attention": attending,
    "in place": writing,
    "random numbers": drawing,
    "no inputs": lambda device: torch.compile(lambda: torch.zeros(3, device=device) + 2)(),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("engine", ENGINES)
def test_values_are_those_of_the_cpus_own_compiled_code(way: str, engine: Any) -> None:
    expected = pytree.tree_leaves(WAYS[way]("cpu"))
    torch._dynamo.reset()
    with torchdevice.simulate("cuda", count=2, engine=engine, random="cpu") as scope:
        given = pytree.tree_leaves(WAYS[way]("cuda"))
        found = [each.cpu() for each in given]
        assert any(each.is_cuda for each in given)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    by_operators = [
        entry.done for entry in scope.journal.entries if "operator by operator" in entry.done
    ]
    assert not by_operators, "the graph was compiled"


def test_a_graph_that_draws_on_two_devices_runs_by_operators() -> None:
    """The CPU's code draws from one generator, which can stand for one device."""

    def draw(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.rand_like(x), torch.rand_like(y)

    with torchdevice.simulate("cuda", count=2) as scope:
        drawn = torch.compile(draw)(torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"))
        assert [each.device.index for each in drawn] == [0, 1]
    (found,) = (
        entry.done for entry in scope.journal.entries if "operator by operator" in entry.done
    )
    assert found.endswith("it draws random numbers on simulated:0 and simulated:1")


@pytest.mark.sampled(2, of="processes that compile")
@pytest.mark.parametrize(
    "line",
    [
        "torch.compiler.cudagraph_mark_step_begin()",
        "import torch._inductor.cudagraph_trees",
        "from torch._dynamo import compiled_autograd; "
        "compiled_autograd._enable(torch.compile()).__enter__()",
    ],
)
def test_compilers_that_are_first_imported_in_a_scope(
    chosen: str, tmp_path: Any, line: str
) -> None:
    """They must see that torch is built without CUDA, since they import names of such a build."""
    ran = run_program(
        tmp_path, f"import torch\n{line}\nprint(torch.ones(2, device='cuda').sum().item())"
    )
    assert ran.stdout.splitlines() == ["2.0"], ran.stderr[-2000:]


def test_inductor_is_given_the_class_that_makes_code(tmp_path: Any) -> None:
    """Torch asks ``issubclass``, for GPU inputs of graphs in 2.15; the CPU has a function."""
    program = """
        import torch
        from torch._inductor import ir
        from torch._inductor.codegen import common, cpp
        from torch._inductor.compile_fx import compile_fx

        def compiler(graph, examples):
            (x,) = examples
            kind = common.get_scheduling_for_device(x.device.type)
            print(issubclass(kind, cpp.CppScheduling), ir.is_triton(x.device))
            return compile_fx(graph, examples)

        common.init_backend_registration()
        print(torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2, device="cuda")).tolist())
    """
    ran = run_program(tmp_path, program, options=("--target", "simulated:cuda"))
    assert ran.stdout.splitlines() == ["True False", "[2.0, 2.0]"], ran.stderr[-2000:]
