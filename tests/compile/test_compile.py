"""Compiled CUDA programs: whole graphs, code that scopes share, torch's own export and tracing."""

from __future__ import annotations

import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sweeping
import tiny_models
import torch
import torch._dynamo.testing
import torch.fx.experimental.proxy_tensor
from conftest import plain_torch
from processes import run_program, run_python
from torch import _higher_order_ops as higher_order
from torch._dynamo.testing import CompileCounter
from torch._higher_order_ops.map import map as higher_order_map
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchdevice
from torchdevice.errors import NotSupportedError, UnknownTargetError
from torchdevice.kernel.devices import cpu as cpu_runtime
from torchdevice.kernel.devices import module as module_runtime

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STREAMS_IN_GRAPHS = torch.__version__ >= "2.11"
"""torch 2.10 makes no streams or events in a graph, on CUDA neither."""


def factory(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(3, device="cuda") + torch.arange(3, device="cuda:0") + x


def cuda(x: torch.Tensor) -> torch.Tensor:
    return x.cuda() * 2


def to(x: torch.Tensor) -> torch.Tensor:
    return (
        x.to("cuda")
        + x.to("cuda", torch.float64).float()
        + x.to(device="cuda", dtype=torch.float32)
    )


def to_a_device(x: torch.Tensor) -> torch.Tensor:
    device = torch.device("cuda")
    return (
        torch.ones(3, device=device)
        + x.to(torch.device("cuda", 0))
        + torch.tensor([1.0, 2, 3], device=device)
    )


def ordinal(x: torch.Tensor) -> torch.Tensor:
    return x.to(0) + torch.full((3,), 2.0, device=0) + x.new_zeros(3, device="cuda")


def on_its_device(x: torch.Tensor) -> torch.Tensor:
    with torch.cuda.device(0):
        return x + torch.zeros(3, device="cuda")


def is_cuda(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.is_cuda else x - 1


def questions(x: torch.Tensor) -> torch.Tensor:
    return (
        x + torch.cuda.device_count() + torch.cuda.current_device()
        if torch.cuda.is_available()
        else x
    )


def properties(x: torch.Tensor) -> torch.Tensor:
    return x + torch.cuda.get_device_properties(0).multi_processor_count


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return x.view(1, 3) @ x.view(3, 1)


def like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, device="cuda") + torch.empty_like(x).fill_(2) + x.cpu().cuda()


def attention(x: torch.Tensor) -> torch.Tensor:
    q = x.cuda().view(1, 1, 3, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q).view(3)


def methods_in_python(x: torch.Tensor) -> torch.Tensor:
    parts = x.unflatten(0, (3, 1)).split(1)
    return sum(((2 - part) // 1 + part.norm()).flatten() for part in parts)  # type: ignore[return-value]


def synchronizing(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x + 1


def in_a_stream(x: torch.Tensor) -> torch.Tensor:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = x * 2
    torch.cuda.current_stream().wait_stream(stream)
    return y


def with_an_event(x: torch.Tensor) -> torch.Tensor:
    event = torch.cuda.Event()
    event.record()
    event.wait()
    return x + 1


PLAIN: list[Callable[[torch.Tensor], torch.Tensor]] = [
    factory,
    cuda,
    to,
    to_a_device,
    on_its_device,
    ordinal,
    is_cuda,
    questions,
    properties,
    autocast,
    like,
    attention,
    methods_in_python,
]
STREAMS: list[Callable[[torch.Tensor], torch.Tensor]] = []
if STREAMS_IN_GRAPHS:
    STREAMS = [in_a_stream, with_an_event]
if torch.__version__ >= "2.12":  # Dynamo of torch 2.11 refuses to trace it, on CUDA too
    STREAMS.append(synchronizing)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("function", [*PLAIN, *STREAMS], ids=lambda function: function.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_whole_graphs(cuda: torchdevice.Scope, kind: str, backend: str, function: Any) -> None:
    if function is in_a_stream and backend == "aot_eager" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no wait_stream in graphs of aot_eager (docs/limits.md)")
    x = torch.rand(3).cuda()
    compiled = torch.compile(function, backend=backend, fullgraph=True)(x)
    assert compiled.device.type == kind and torch.allclose(compiled, function(x))


def moved_and_more(x: torch.Tensor) -> torch.Tensor:
    return x.cuda() * 2 + torch.ones(3, device="cuda")


def filled(x: torch.Tensor) -> torch.Tensor:
    return torch.full((3,), 2.0, device=torch.device("cuda")) - x.to("cuda")


HIGHER_ORDER: dict[str, Callable[[torch.Tensor], Any]] = {
    "cond": lambda x: torch.cond(x.sum() > 1, moved_and_more, filled, (x,)),
    "while_loop": lambda x: higher_order.while_loop(
        lambda i, x: i < torch.full((), 3, device="cuda"),
        lambda i, x: (i + 1, moved_and_more(x)),
        (torch.zeros((), dtype=torch.int64, device="cuda"), x),
    ),
    "scan": lambda x: higher_order.scan(
        lambda carry, x: (carry + moved_and_more(x), filled(x)), x, torch.stack([x, x])
    ),
    "map": lambda x: higher_order_map(moved_and_more, torch.stack([x, x])),
    "associative_scan": lambda x: higher_order.associative_scan(
        lambda a, b: a + filled(b), torch.stack([x, x]), dim=0, combine_mode="generic"
    ),
    "checkpoint": lambda x: checkpoint(moved_and_more, x, use_reentrant=False),
    "grad": lambda x: torch.func.grad(lambda x: (moved_and_more(x) * filled(x)).sum())(x),
    "vmap": lambda x: torch.vmap(moved_and_more)(torch.stack([x, x])),
}
"""Operators that trace functions of the program, which speak of devices."""


def by_hand(name: str, x: torch.Tensor) -> Any:
    """Return what the higher-order operator of that name gives, computed without it."""
    more, full = x * 2 + 1, 2 - x
    values: dict[str, Callable[[], Any]] = {
        "cond": lambda: more if x.sum() > 1 else full,
        "while_loop": lambda: (torch.tensor(3), x * 8 + 7),
        "scan": lambda: (x + 2 * more, torch.stack([full, full])),
        "map": lambda: torch.stack([more, more]),
        "associative_scan": lambda: torch.stack([x, x + full]),
        "checkpoint": lambda: more,
        "grad": lambda: 3 - 4 * x,
        "vmap": lambda: torch.stack([more, more]),
    }
    return values[name]()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_functions_of_higher_order_operators(
    cuda: torchdevice.Scope, kind: str, name: str, compiled: bool
) -> None:
    function: Any = HIGHER_ORDER[name]
    if compiled:
        function = torch.compile(function, backend="eager", fullgraph=True)
    for x in (torch.rand(3) + 1, -torch.rand(3)):
        results = pytree.tree_leaves(function(x.cuda()))
        assert {each.device.type for each in results} == {kind}
        torch.testing.assert_close(
            [each.cpu() for each in results], pytree.tree_leaves(by_hand(name, x))
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "function", [factory, to_a_device, attention, autocast], ids=lambda f: f.__name__
)
def test_whole_graphs_by_inductor(cuda: torchdevice.Scope, kind: str, function: Any) -> None:
    x = torch.rand(3).cuda()
    compiled = torch.compile(function, fullgraph=True)(x)
    assert compiled.device.type == kind and torch.allclose(compiled, function(x), rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"mode": "reduce-overhead"}, ["triton.cudagraphs"]),
        ({"mode": "max-autotune"}, ["triton.cudagraphs"]),
        ({"options": {"triton.cudagraphs": True, "epilogue_fusion": True}}, ["triton.cudagraphs"]),
        ({"options": {"triton.cudagraphs": False}}, []),
        ({"backend": "cudagraphs"}, ["backend cudagraphs"]),
        ({"backend": "eager"}, []),
    ],
    ids=str,
)
def test_options_for_cuda(
    cuda: torchdevice.Scope, options: dict[str, Any], dropped: list[str]
) -> None:
    model, x = torch.nn.Linear(3, 3).cuda(), torch.rand(2, 3, device="cuda")
    # One choice, which needs no timing.
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN"):
        assert torch.allclose(
            torch.compile(model, fullgraph=True, **options)(x), model(x), atol=1e-6
        )
    inert = [
        entry for entry in cuda.journal.entries if entry.fidelity is torchdevice.Fidelity.INERT
    ]
    # A library that is imported in a scope (Lightning) keeps the torch.compile of that scope, and
    # calls it once more.
    assert {entry.requested for entry in inert if entry.site.file == __file__} == {
        f"torch.compile with {option}" for option in dropped
    }


@pytest.mark.sampled(2, of="processes that compile")
@pytest.mark.parametrize(
    "first", ["torch._dynamo.reset()", "torch.compiler.reset()", "import torch._dynamo"]
)
def test_dynamo_by_whatever_name_it_is_first_used(chosen: str, tmp_path: Path, first: str) -> None:
    program = f"""
        import torch
        {first}
        step = torch.compile(lambda x: x.cuda() + torch.ones(2, device="cuda"), backend="eager", fullgraph=True)
        print(step(torch.ones(2)).tolist())
        print(type(torch._dynamo.__loader__).__name__, torch._dynamo.__spec__.loader is torch._dynamo.__loader__)
    """
    ran = run_program(tmp_path, program)
    assert ran.stdout.splitlines() == ["[2.0, 2.0]", "SourceFileLoader True"], ran.stderr[-2000:]


@pytest.mark.sampled(2, of="processes that compile")
def test_functions_dynamo_traced_before_the_scope(chosen: str, tmp_path: Path) -> None:
    program = f"""
        import torch, torchdevice

        def plain(x):
            return torch.zeros_like(x) + x.to("cpu")

        def in_a_stream(x):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                y = x.cuda() * 2
            torch.cuda.current_stream().wait_stream(stream)
            return y + torch.ones(2, device="cuda")

        def scoped(x):
            with torchdevice.portable({chosen!r}):
                y = x.cuda() * 2 + torch.ones(2, device="cuda")
            return y.cpu() + 1

        def compiled(function):
            return torch.compile(function, backend="eager")(torch.ones(2)).tolist()

        with torch.device("cpu"):
            print(compiled(plain), compiled(scoped))
        with torchdevice.portable({chosen!r}):
            print(compiled(plain), compiled(scoped), compiled(in_a_stream))
        print(compiled(plain), compiled(scoped))
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    ran = run_python(str(path))
    plain, scoped = "[1.0, 1.0]", "[4.0, 4.0]"
    assert ran.stdout.splitlines() == [
        f"{plain} {scoped}",
        f"{plain} {scoped} [3.0, 3.0]",
        f"{plain} {scoped}",
    ], ran.stderr


def test_the_current_stream_is_looked_up_only_for_graphs_that_use_streams(
    cuda: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    registry: Any = torch._dynamo.graph_bytecode_inputs
    original = registry.store_user_object_weakrefs

    def store(*objects: Any) -> None:
        looked_up.append(len(objects))
        original(*objects)

    monkeypatch.setattr(registry, "store_user_object_weakrefs", store)
    x = torch.ones(3, device="cuda")
    torch.compile(factory, backend="eager", fullgraph=True)(x)
    assert looked_up == []
    if STREAMS_IN_GRAPHS:
        torch.compile(in_a_stream, backend="eager", fullgraph=True)(x)
        assert looked_up


def test_dynamic_shapes(cuda: torchdevice.Scope) -> None:
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: x.cuda() + torch.ones(x.shape, device="cuda"),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for size in (3, 5, 7, 9):
        assert compiled(torch.zeros(size)).sum() == size
    assert counter.frame_count == 1


def test_training(cuda: torchdevice.Scope) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    ).cuda()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.rand(16, 4, device="cuda"), torch.rand(16, 1, device="cuda")
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.mse_loss(compiled(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def with_a_generator(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x.cuda() * 2 + torch.rand(3, generator=generator, device="cuda")


def making_a_generator(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    own = torch.Generator(device="cuda")
    own.manual_seed(generator.initial_seed())
    return x.cuda() * 2 + torch.rand(3, generator=own, device="cuda")


@pytest.mark.parametrize(
    "function", [with_a_generator, making_a_generator], ids=lambda f: f.__name__
)
def test_generators(cuda: torchdevice.Scope, kind: str, function: Any) -> None:
    """Torch breaks the graph where a generator draws and runs the call, also in a scope."""
    x, generator = torch.ones(3), torch.Generator("cuda")
    expected = function(x, generator.manual_seed(3))
    actual = torch.compile(function, backend="eager")(x, generator.manual_seed(3))
    assert torch.equal(expected, actual) and actual.device.type == kind
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, backend="eager", fullgraph=True)(x, generator)


class TestCompiledCodeIsShared:
    """Code that was compiled in one scope runs in later scopes."""

    @pytest.mark.sampled(8)
    @pytest.mark.parametrize("function", [*PLAIN, *STREAMS], ids=lambda function: function.__name__)
    def test_scopes_of_one_target_share_compiled_code(self, target: str, function: Any) -> None:
        counter = CompileCounter()
        compiled = torch.compile(function, backend=counter, fullgraph=True)

        def run() -> None:
            compiled(torch.ones(3).cuda())

        for _ in range(2):
            with torchdevice.portable(target) as scope:
                run()
                with scope:
                    run()
                with torchdevice.portable(target):
                    run()
        with torchdevice.portable(target):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        assert counter.frame_count == 1

    def test_operators_seen_in_between_cause_no_recompilation(self, target: str) -> None:
        """Operators that a scope first sees are added to a table that no guard depends on."""
        counter = CompileCounter()
        compiled = torch.compile(
            lambda x: x.cuda().atan().erfinv() + 1, backend=counter, fullgraph=True
        )
        with torchdevice.portable(target):
            x = torch.ones(3, device="cuda")
            compiled(x)
            x.erfinv().lgamma().atan().bessel_j0() if hasattr(
                x, "bessel_j0"
            ) else x.erfinv().lgamma()
            compiled(x)
        assert counter.frame_count == 1

    def test_another_target_compiles_once_more(self) -> None:
        counter = CompileCounter()
        compiled = torch.compile(factory, backend=counter, fullgraph=True)
        for _ in range(2):
            for target in ("cpu", "simulated:cuda"):
                with torchdevice.portable(target):
                    assert compiled(torch.ones(3).cuda()).tolist() == [1, 2, 3]
        assert counter.frame_count == 2

    def test_spellings_without_an_ordinal_follow_the_current_device(self) -> None:
        compiled = torch.compile(
            lambda x: x.cuda() + torch.ones(2, device="cuda"), backend="eager", fullgraph=True
        )
        with torchdevice.simulate(count=2):
            for index in (0, 1, 0):
                torch.cuda.set_device(index)
                assert compiled(torch.ones(2)).device.index == index

    def test_compiled_functions_are_plain_torch_after_the_scope(self, target: str) -> None:
        counter = CompileCounter()
        compiled = torch.compile(lambda x: torch.zeros(3, device="cuda") + x, backend=counter)
        with torchdevice.portable(target):
            compiled(torch.ones(3).cuda())
        with pytest.raises((AssertionError, RuntimeError)) as caught:
            compiled(torch.ones(3))
        assert "torchdevice" not in str(caught.value)

    def test_scopes_in_compiled_functions(self, target: str, kind: str) -> None:
        @torch.compile(backend="eager")
        def inside(x: torch.Tensor) -> torch.Tensor:
            with torchdevice.portable(target):
                return x.cuda() + 1

        @torch.compile(backend="eager")
        @torchdevice.portable(target)
        def decorated(x: torch.Tensor) -> torch.Tensor:
            return x.cuda() + 1

        @torchdevice.portable(target)
        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x: torch.Tensor) -> torch.Tensor:
            return x.cuda() + 1

        # No scope is a simulated Mac here.
        outside = "simulated" if target == "simulated:mps" else kind
        for _ in range(2):
            assert all(
                f(torch.ones(2)).device.type == outside for f in (inside, decorated, compiled)
            )


class TestCaches:
    PROGRAM = """
        import sys, torch, torchdevice
        from torch._dynamo.utils import counters
        def f(x): return (x.cuda() * 3).sin() + torch.ones(7, device="cuda")
        for _ in range(2):
            torch._dynamo.reset()
            with torchdevice.portable("cpu"):
                torch.compile(f, fullgraph=True)(torch.ones(7))
        for compiler, cache in (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache")):
            print(*(counters[compiler][f"{cache}_{found}"] for found in ("miss", "hit")), end=" ")
        print(torch.utils._triton.has_triton())
    """

    @pytest.mark.sampled(2, of="processes that compile")
    def test_hit_across_scopes_and_processes(self, tmp_path: Path) -> None:
        results = [
            run_python(
                "-c",
                textwrap.dedent(self.PROGRAM),
                cwd=tmp_path,
                TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "c"),
            )
            for _ in range(2)
        ]
        assert [result.stdout.strip() for result in results] == ["1 1 1 1 False", "0 2 0 2 False"]


class Moving(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to("cuda")) + torch.ones(4, device="cuda")


class TestTracing:
    @pytest.fixture
    def model(self, cuda: torchdevice.Scope) -> Moving:
        return Moving().cuda()

    @pytest.fixture
    def x(self, cuda: torchdevice.Scope) -> torch.Tensor:
        return torch.rand(2, 4, device="cuda")

    @pytest.mark.parametrize("strict", [False, True])
    def test_export(self, model: Moving, x: torch.Tensor, strict: bool) -> None:
        exported = torch.export.export(model, (x,), strict=strict)
        assert torch.allclose(exported.module()(x), model(x))

    def test_symbolic_trace_and_make_fx(self, model: Moving, x: torch.Tensor) -> None:
        assert torch.allclose(torch.fx.symbolic_trace(model)(x), model(x))
        for mode in ("real", "fake", "symbolic"):
            graph = torch.fx.experimental.proxy_tensor.make_fx(
                lambda v: model(v), tracing_mode=mode, _allow_non_fake_inputs=True
            )(x)
            assert torch.allclose(graph(x), model(x))

    def test_jit_trace(self, model: Moving, x: torch.Tensor) -> None:
        assert torch.allclose(torch.jit.trace(model, (x,))(x), model(x))

    def test_functional_call_and_transforms(self, model: Moving, x: torch.Tensor) -> None:
        assert torch.allclose(
            torch.func.functional_call(model, dict(model.named_parameters()), (x,)), model(x)
        )
        assert torch.allclose(torch.func.vmap(lambda row: model(row))(x), model(x))

        def scaled(v: torch.Tensor) -> torch.Tensor:
            return (v.cuda() * torch.full((4,), 2.0, device="cuda")).sum()

        for transform, expected in (
            (torch.func.grad(scaled), torch.full((2, 4), 2.0)),
            (torch.func.vmap(scaled), None),
        ):
            compiled = torch.compile(transform, backend="aot_eager", fullgraph=True)(x)
            assert torch.allclose(
                compiled.cpu(), 2 * x.cpu().sum(1) if expected is None else expected
            )

    def test_fake_tensors(self, cuda: torchdevice.Scope, kind: str) -> None:
        with FakeTensorMode():
            a, b = torch.ones(3).cuda(), torch.ones(3, device="cuda:0")
            assert (a + b).device.type == kind == a.to("cuda").device.type

    @pytest.mark.sampled(2, of="processes that compile")
    @pytest.mark.one_engine
    def test_packaging(self, tmp_path: Path) -> None:
        with torchdevice.portable("cpu"):
            model, x = Moving().cuda(), torch.rand(2, 4, device="cuda")
            path = torch._inductor.aoti_compile_and_package(
                torch.export.export(model, (x,)), package_path=str(tmp_path / "m.pt2")
            )
            assert torch.allclose(torch._inductor.aoti_load_package(path)(x), model(x), atol=1e-6)

    @pytest.mark.one_engine
    def test_packaging_for_a_device_without_code_is_refused(self) -> None:
        with torchdevice.portable("simulated:mps"):
            model, x = torch.nn.Linear(4, 2).cuda(), torch.rand(3, 4, device="cuda")
            exported = torch.export.export(model, (x,))
            for compile_ahead in (
                lambda: torch._inductor.aoti_compile_and_package(exported),
                lambda: torch._inductor.aot_compile(exported.module(), (x,)),
            ):
                with pytest.raises(
                    NotSupportedError,
                    match=r"AOTInductor.*Package the model in .*makes no code for",
                ):
                    compile_ahead()

    @pytest.mark.sampled(2, of="processes that compile")
    def test_dtensor_with_fake_tensors(self, target: str, tmp_path: Path) -> None:
        program = """
            import torch
            from torch._subclasses import FakeTensorMode
            from torch.distributed.tensor import DTensor, Shard
            from torch.testing._internal.distributed.fake_pg import FakeStore

            torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
            mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2,))
            with FakeTensorMode():
                local = torch.ones(4, 4, device="cuda")
                whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
                print(tuple(whole.shape), tuple((whole + whole).to_local().shape))
        """
        ran = run_program(tmp_path, program, options=["--target", target])
        assert ran.stdout.strip() == "(8, 4) (4, 4)", ran.stderr


class TestDeviceInterfaces:
    @pytest.fixture(autouse=True)
    def dynamo(self, cuda: torchdevice.Scope) -> None:
        torch.compile(lambda x: x, backend="eager")(torch.ones(1))

    def test_each_device_has_an_interface(self, cuda: torchdevice.Scope, kind: str) -> None:
        from torch._dynamo.device_interface import DeviceInterface, get_interface_for_device

        names = ["cuda", "cuda:0", kind, torch.ones(1, device="cuda").device]
        for interface in map(
            get_interface_for_device, [*names, *([f"{kind}:0"] if kind != "cpu" else [])]
        ):
            assert issubclass(interface, DeviceInterface) and interface.is_available()
        interface = get_interface_for_device("cuda")
        assert interface.device_count() == 1 and interface.current_device() == 0
        assert interface.current_stream() == torch.cuda.default_stream()
        stream = torch.cuda.Stream()
        interface._set_stream_by_id(stream.stream_id, stream.device_index, stream.device_type)
        assert interface.current_stream() == stream
        interface.set_stream(torch.cuda.default_stream())
        assert interface.get_device_properties(0) == torch.cuda.get_device_properties(0)
        interface.synchronize()
        with pytest.raises(NotImplementedError, match="No interface for device nothing"):
            get_interface_for_device("nothing")

    def test_device_guard(self, cuda: torchdevice.Scope) -> None:
        from torch._dynamo.device_interface import DeviceGuard, get_interface_for_device

        with DeviceGuard(get_interface_for_device("cuda"), 0):
            assert torch.cuda.current_device() == 0

    def test_triton_is_reported_as_unavailable(self, cuda: torchdevice.Scope, kind: str) -> None:
        from torch._dynamo.device_interface import get_interface_for_device

        if kind == "simulated":
            assert not get_interface_for_device(kind).is_triton_capable()
            with pytest.raises(RuntimeError, match="Triton makes no code for 'simulated:"):
                get_interface_for_device(kind).raise_if_triton_unavailable()
        assert torch.utils._triton.has_triton() is False


def test_interfaces_are_withdrawn(target: str) -> None:
    from torch._dynamo.device_interface import device_interfaces

    before = dict(device_interfaces)
    with torchdevice.portable(target, devices=3):
        torch.compile(lambda x: x, backend="eager")(torch.ones(1))
        assert "cuda:2" in device_interfaces
    assert {key: value for key, value in device_interfaces.items() if key in before} == before
    assert "cuda:2" not in device_interfaces and "simulated" not in device_interfaces


class Vax(cpu_runtime.CpuRuntime):
    """An out-of-tree device whose tensors are on torch's meta device."""

    device_type = "meta"
    shares_host_memory = False

    def device(self, index: int) -> torch.device:
        return torch.device("meta")


class TestRegisteredRuntimes:
    def test_a_registered_runtime_is_a_target(self) -> None:
        take_back = torchdevice.register_runtime(Vax())
        try:
            with torchdevice.portable("meta", identity="program") as scope:
                assert scope.runtime.device_type == "meta" and torch.ones(2, device="cuda").is_meta
                assert torch.cuda.is_available() and torch.ones(2, device="cuda").is_cuda
                counter = CompileCounter()
                compiled = torch.compile(lambda x: x.cuda() + 1, backend=counter, fullgraph=True)
                assert compiled(torch.ones(2)).is_meta and counter.frame_count == 1
                interface = torch._dynamo.device_interface.get_interface_for_device("meta")
                assert interface.current_device() == 0
            with pytest.raises(ValueError, match="there is a runtime for 'meta' already"):
                torchdevice.register_runtime(Vax())
        finally:
            take_back()
        with pytest.raises(UnknownTargetError), torchdevice.portable("meta"):
            pass

    @pytest.mark.parametrize(
        ("runtime", "error", "message"),
        [
            (torch.device("cpu"), TypeError, "is not a runtime"),
            (cpu_runtime.CpuRuntime(), ValueError, "there is a runtime for 'cpu' already"),
            (module_runtime.ModuleRuntime("two words"), ValueError, "is not a device type"),
        ],
        ids=["not a runtime", "a device type that has a runtime", "not a device type"],
    )
    def test_invalid_registrations_are_refused(
        self, runtime: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            torchdevice.register_runtime(runtime)


def test_a_graph_break_of_the_program_reads_as_torchs_own(cuda: torchdevice.Scope) -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        print("hello", file=open("/dev/null", "w"))  # noqa: SIM115
        return x.cuda()

    def message() -> str:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(1))
        return str(caught.value).partition("\n")[0]

    inside = message()
    with plain_torch():
        assert inside == message()


SPELLINGS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.cuda(),
    lambda x: x.to("cuda"),
    lambda x: x.to(torch.device("cuda:0")),
    lambda x: x.to(device="cuda"),
]


def test_operators_of_torchs_database_make_whole_graphs(
    target: str, sweep: tuple[bool, int], capsys: Any
) -> None:
    """Compile move and operator in one graph, for each operator that plain torch can.

    A sample ends after 12 operators.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    compared, refused = 0, []
    candidates = [
        op for op in sweeping.shuffled(op_db, sweep) if torch.float32 in op.supported_dtypes("cpu")
    ]
    for number, op in enumerate(candidates):
        if compared == 8 and not sweep[0]:
            break
        sample = next(iter(sweeping.samples_of(op, torch.float32)), None)
        if (
            sample is None
            or not isinstance(sample.input, torch.Tensor)
            or op.name.startswith(("empty", "new_empty"))
        ):
            continue
        spelled = SPELLINGS[number % len(SPELLINGS)]

        def call(
            x: torch.Tensor, *args: Any, op: Any = op, spelled: Any = spelled, sample: Any = sample
        ) -> Any:
            return op(spelled(x), *args, **sample.kwargs)

        others = torch.utils._pytree.tree_leaves((sample.args, sample.kwargs))
        if target != "cpu" and any(isinstance(value, torch.Tensor) for value in others):
            continue
        torch._dynamo.reset()
        try:
            plain = torch.compile(
                lambda x, op=op, s=sample: op(x, *s.args, **s.kwargs),
                backend="eager",
                fullgraph=True,
            )
            torch.manual_seed(0)
            expected = plain(sample.input)
        except Exception:
            refused.append(op.name)
            continue
        torch._dynamo.reset()
        with torchdevice.portable(target):
            torch.manual_seed(0)
            actual = torch.compile(call, backend="eager", fullgraph=True)(
                sample.input, *sample.args
            )
        same = sweeping.identical(expected, actual, target.partition(":")[0])
        assert not same or "stride" in same, (op.name, same)
        compared += 1
    with capsys.disabled():
        print(
            f"\ncompiled on {target}: {compared} operators in whole graphs; plain torch refuses "
            f"{sorted(set(refused))}"
        )
    assert compared >= (30 if sweep[0] else 8)


ARCHITECTURES = [
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "bert",
    "roberta",
    "opt",
    "gpt_neox",
    "phi",
    "bloom",
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_architectures_agree_with_eager(target: str, name: str) -> None:
    family = next(family for family, known in tiny_models.all_names() if known == name)
    tiny = tiny_models.build(family, name)
    model = tiny.model.eval()
    with torch.no_grad(), torchdevice.portable(target):
        model = model.to("cuda")
        inputs = {key: value.to("cuda") for key, value in tiny.inputs.items()}
        expected = model(**inputs)[0]
        model.compile(backend="aot_eager")
        compiled = model(**inputs)[0]
    assert torch.allclose(expected.cpu(), compiled.cpu(), atol=1e-5)


class TestTransformers:
    @pytest.fixture
    def llama(self, cuda: torchdevice.Scope) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
        return LlamaForCausalLM(config).to("cuda").eval()

    def test_generate_with_a_static_cache_compiled(self, llama: Any) -> None:
        ids = torch.randint(0, 64, (1, 8), device="cuda")
        expected = llama.generate(ids, max_new_tokens=6, do_sample=False)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        llama.forward = torch.compile(llama.forward, backend=counter)
        compiled = llama.generate(
            ids, max_new_tokens=6, do_sample=False, cache_implementation="static"
        )
        assert torch.equal(expected, compiled) and counter.frame_count >= 1

    def test_trainer(self, llama: Any, tmp_path: Path) -> None:
        from transformers import Trainer, TrainingArguments

        rows = [
            {"input_ids": torch.randint(0, 64, (8,)), "labels": torch.randint(0, 64, (8,))}
            for _ in range(8)
        ]
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            torch_compile=True,
            torch_compile_backend="aot_eager",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        assert 0 < Trainer(llama, arguments, train_dataset=rows).train().training_loss < 10

    def test_accelerates_plugin(self, cuda: torchdevice.Scope) -> None:
        from accelerate import Accelerator
        from accelerate.utils import TorchDynamoPlugin

        accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))
        model = torch.nn.Linear(4, 4)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss = model(torch.ones(2, 4, device=accelerator.device)).sum()
        accelerator.backward(loss)
        assert isinstance(model, torch._dynamo.OptimizedModule)


@pytest.mark.one_engine
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.pad(x, (1, 1)),
        lambda x: torch.nn.functional.interpolate(x, scale_factor=2),
        lambda x: torch.nn.functional.softmin(x, dim=-1),
        lambda x: torch.nn.functional.glu(x),
        lambda x: torch.nn.functional.hardtanh(x),
        lambda x: torch.nn.functional.normalize(x),
        lambda x: torch.tensordot(x, x, 3),
    ],
    ids=["pad", "interpolate", "softmin", "glu", "hardtanh", "normalize", "tensordot"],
)
def test_defaults_of_functions_in_python_are_guarded(
    engine: Any, function: Callable[..., torch.Tensor]
) -> None:
    # Dynamo goes into some of them, and guards on their defaults, which must be functions.
    with torchdevice.simulate("mps", engine=engine):
        x = torch.arange(16.0, device="cuda").reshape(1, 2, 8)
        assert torch.equal(torch.compile(function, backend="eager", fullgraph=True)(x), function(x))


@pytest.mark.usefixtures("chosen")
def test_compiling_after_a_process_group_has_begun() -> None:
    with torchdevice.portable():
        torch._dynamo.trace_rules.clear_lru_cache()  # so does init_process_group
        compiled = torch.compile(factory, backend="eager", fullgraph=True)
        assert compiled(torch.ones(3, device="cuda")).tolist() == [1, 2, 3]


@pytest.mark.parametrize("place", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_backward_is_compiled_for_the_machine_as_it_is(engine: str, place: str) -> None:
    def step(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 16).to(device)
        compiled = torch.compile(
            lambda x: torch.softmax(model(x), -1) + torch.arange(16, device=x.device)
        )
        compiled(torch.ones(5, 8).to(device)).pow(2).sum().backward()
        return [
            parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None
        ]

    expected = step("cpu")
    torch._dynamo.reset()
    with (
        torchdevice.portable(place, engine=engine),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", "TensorFloat32")  # of a compiler that sees CUDA
        found = step("cuda")
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_code_that_is_kept_on_disk_with_its_guards(engine: str, tmp_path: Path) -> None:
    program = """
        import torch
        doubled = torch.compile(lambda x: (x * 2 + torch.ones(3, device="cuda")).sum())
        print(doubled(torch.ones(3, device="cuda")).item())
    """
    environment = {
        "TORCH_CACHING_PRECOMPILE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHDEVICE_ENGINE": engine,
    }
    for _ in range(2):
        done = run_program(tmp_path, program, options=("--target", "cpu"), **environment)
        assert (done.returncode, done.stdout) == (0, "9.0\n"), done.stderr
