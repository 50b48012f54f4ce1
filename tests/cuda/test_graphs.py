"""CUDA graphs: warm up, capture, refill inputs, replay; results equal the plain program's."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ALONE, plain_torch

import torchdevice
from torchdevice.errors import NotSupportedError
from torchdevice.kernel.stand_ins import same_bits
from torchdevice.torch_modules.cuda import graph_capture

pytestmark = pytest.mark.usefixtures("cuda")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(8, 16),
        torch.nn.LayerNorm(16),
        torch.nn.GELU(),
        torch.nn.Linear(16, 4),
    )
    return torch.nn.Sequential(*layers).cuda()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(6, 8, generator=generator).cuda(),
            torch.randn(6, 4, generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def warmed_up(step: Any) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_whole_training_step(name: str) -> None:
    def train(graphed: bool) -> list[torch.Tensor]:
        model = network()
        options = {"momentum": 0.9} if name == "SGD" else {"capturable": True}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)
        x, y = (tensor.clone() for tensor in batches(1)[0])

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        warmed_up(step)
        if graphed:
            optimizer.zero_grad(set_to_none=True)
            before = [p.detach().clone() for p in model.parameters()]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                static_loss = step()
            assert all(
                torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
            ), "capturing trained"
        losses = []
        for new_x, new_y in batches(5):
            x.copy_(new_x)
            y.copy_(new_y)
            if graphed:
                graph.replay()
                losses.append(static_loss.detach().clone())
            else:
                losses.append(step().detach())
        return [*losses, *(p.detach() for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


def test_inference_into_the_same_memory() -> None:
    model, graph = network().eval(), torch.cuda.CUDAGraph()
    static = torch.zeros(6, 8, device="cuda")
    with torch.no_grad():
        warmed_up(lambda: model(static))
        with torch.cuda.graph(graph):
            out = model(static)
            view = out[0].view(2, 2).t()
        address = out.data_ptr()
        for x, _ in batches(3):
            static.copy_(x)
            graph.replay()
            assert torch.equal(out, model(x)) and torch.equal(view, model(x)[0].view(2, 2).t())
        assert out.data_ptr() == address


def test_state_changes_at_replay_and_not_at_capture() -> None:
    counter, cache = torch.zeros((), device="cuda"), torch.zeros(4, 2, device="cuda")
    position = torch.zeros(1, dtype=torch.long, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        cache.index_copy_(0, position, counter.expand(1, 2).contiguous())
        position += 1
    assert counter.item() == 0 and not cache.any() and position.item() == 0
    for _ in range(3):
        graph.replay()
    assert counter.item() == 3 and cache[:, 0].tolist() == [1.0, 2.0, 3.0, 0.0]


def test_every_replay_draws_new_numbers() -> None:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.manual_seed(4)
    with torch.cuda.graph(graph):
        noise = torch.randn(5, device="cuda")
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(noise.clone())
    torch.cuda.manual_seed(4)
    assert [d.tolist() for d in drawn] == [torch.randn(5, device="cuda").tolist() for _ in range(2)]
    assert not torch.equal(*drawn)


def test_make_graphed_callables() -> None:
    def train(graphed: bool) -> list[torch.Tensor]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sample = torch.randn(6, 8, device="cuda", requires_grad=True)
        forward = torch.cuda.make_graphed_callables(model, (sample,)) if graphed else model
        for x, y in batches(4):
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(forward(x.requires_grad_()), y).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


def test_queries_pools_and_isinstance() -> None:
    graph = torch.cuda.CUDAGraph()
    assert isinstance(graph, torch.cuda.CUDAGraph) and not torch.cuda.is_current_stream_capturing()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        assert torch.cuda.is_current_stream_capturing()
        torch.ones(1, device="cuda")
    assert not torch.cuda.is_current_stream_capturing()
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other, pool=graph.pool()):
        torch.ones(1, device="cuda")
    assert other.pool() == graph.pool()


def test_misuse_raises_cudas_errors() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(
        RuntimeError, match=r"^CUDA graphs must be captured on a non-default stream\. \(However"
    ):
        torch.cuda.CUDAGraph().capture_begin()
    with pytest.raises(RuntimeError, match="replay without a preceding successful capture"):
        graph.replay()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda")
        with pytest.raises(torch.AcceleratorError, match="not permitted when stream is capturing"):
            torch.cuda.CUDAGraph().capture_begin()
    with (
        pytest.raises(RuntimeError, match="already owns a captured graph"),
        torch.cuda.graph(graph),
    ):
        pass
    graph.reset()
    with torch.cuda.graph(graph):
        torch.ones(1, device="cuda")
    with pytest.raises(torchdevice.errors.NotSupportedError, match="cudaGraph_t"):
        graph.raw_cuda_graph()


def test_a_graph_is_written_for_graphviz(tmp_path: Path) -> None:
    x, graph, file = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph(), tmp_path / "graph.dot"
    with torch.cuda.graph(graph):
        (x * 2).add_(1)
    with pytest.warns(UserWarning, match="debug not enabled"):
        graph.debug_dump(str(file))
    assert not file.exists()
    graph.enable_debug_mode()
    graph.debug_dump(str(file))
    assert '"0 aten.mul.Tensor" -> "1 aten.add_.Tensor"' in file.read_text()


def test_a_graph_without_work_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"^The CUDA Graph is empty\. ") as warned:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
    assert [each.filename for each in warned] == [__file__]


def test_an_exception_of_the_program_ends_the_capture() -> None:
    x = torch.zeros(2, device="cuda")
    with pytest.raises(KeyError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1
        raise KeyError
    assert not torch.cuda.is_current_stream_capturing() and x.tolist() == [0.0, 0.0]
    assert (x + 1).tolist() == [1.0, 1.0]


def test_a_capture_that_is_not_ended_ends_with_the_scope(chosen: str) -> None:
    with torchdevice.portable():
        x = torch.zeros(2, device="cuda")
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.cuda.CUDAGraph().capture_begin()
        x += 1
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert x.tolist() == [0.0, 0.0]


@ALONE
@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        torch.unique,
        torch.Tensor.to_sparse,
        str,
    ],
    ids=["item", "bool", "mask", "unique", "to_sparse", "print"],
)
def test_what_waits_for_the_device_cannot_be_captured(waits: Any) -> None:
    """A simulated device raises CUDA's error; on a CPU target the call looks like any other."""
    with torchdevice.simulate():
        x = torch.ones(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(torch.AcceleratorError, match="CUDA error: operation"),
            torch.cuda.graph(graph),
        ):
            waits(x)
        with pytest.raises(RuntimeError, match="without a preceding successful capture"):
            graph.replay()
        assert x.sum().item() == 3.0


@ALONE
@pytest.mark.parametrize(
    "copies",
    [
        torch.Tensor.cpu,
        torch.Tensor.tolist,
        lambda x: torch.tensor(1.0, device="cuda"),
        lambda x: x[[0, 1]],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.histc(4),
    ],
    ids=["cpu", "tolist", "tensor", "list as index", "index of the host", "copy_", "histc"],
)
@pytest.mark.skipif(torch.__version__ < "2.11", reason="CUDA itself refuses such copies")
def test_a_copy_of_pageable_memory_is_refused_and_the_capture_goes_on(copies: Any) -> None:
    with torchdevice.simulate():
        x = torch.ones(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            with pytest.raises(
                RuntimeError,
                match=r"^Cannot copy between CPU and CUDA tensors during CUDA graph capture",
            ):
                copies(x)
        x.fill_(3)
        graph.replay()
        assert y.tolist() == [4.0] * 3


@ALONE
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_a_graph() -> None:
    with torchdevice.simulate():
        x, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (torch.nested.nested_tensor([x, x]) * 2).to_padded_tensor(0.0)
        x.fill_(3)
        graph.replay()
        assert y.tolist() == [[6.0, 6.0]] * 2


@pytest.mark.usefixtures("no_collections")
@ALONE
def test_emptying_the_cache_in_a_capture() -> None:
    """CUDA refuses it if there is memory to return, except in the mode for unsafe calls."""
    with torchdevice.simulate(memory="1GiB"):
        with pytest.warns(UserWarning, match="empty"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.cuda.empty_cache()
        held = [torch.empty(1 << 25, device="cuda", dtype=torch.uint8)]
        reserved = torch.cuda.memory_reserved()
        with (
            pytest.raises(torch.AcceleratorError, match="due to a previous"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            held.clear()
            with pytest.raises(
                torch.AcceleratorError, match="not permitted when stream is capturing"
            ):
                torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == reserved
        held.append(torch.empty(1 << 25, device="cuda", dtype=torch.uint8))
        relaxed = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed")
        with pytest.warns(UserWarning, match="empty"), relaxed:
            held.clear()
            torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == reserved - (1 << 25)


_COPIED = (
    {"cond", "matrix_rank", "pinv", "svd", "svdvals"} if torch.__version__ >= "2.11" else set()
)
"""Functions of which torch refuses a copy, and the capture goes on."""

_WAITING = [
    name
    for name in dir(torch.linalg)
    if "synchronizes that device with" in (getattr(torch.linalg, name).__doc__ or "")
]


@ALONE
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", _WAITING)
def test_what_waits_by_torchs_documentation_cannot_be_captured(name: str) -> None:
    with torchdevice.simulate():
        x = torch.eye(3, device="cuda") * 2
        args = (x, x) if name == "solve" else (x,)
        if name in _COPIED:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                with pytest.raises(RuntimeError, match="unless the CPU tensor is pinned"):
                    getattr(torch.linalg, name)(*args)
            return
        with (
            pytest.raises(torch.AcceleratorError, match="due to a previous error"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            with pytest.raises(
                torch.AcceleratorError, match="not permitted when stream is capturing"
            ):
                getattr(torch.linalg, name)(*args)


@ALONE
@pytest.mark.parametrize(
    "name", ["cholesky_ex", "inv_ex", "lu_factor_ex", "ldl_factor_ex", "qr", "det", "slogdet"]
)
def test_what_does_not_wait_can_be_captured(name: str) -> None:
    with torchdevice.simulate():
        x = torch.eye(3, device="cuda") * 2
        with torch.cuda.graph(made := torch.cuda.CUDAGraph()):
            getattr(torch.linalg, name)(x)
        made.replay()


def test_annotations_are_off_although_cudas_bindings_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA builds of torch contain the bindings; annotating would be the work of a driver."""
    pytest.importorskip("torch.cuda._graph_annotations", reason="torch annotates graphs since 2.12")
    annotations = torch.cuda._graph_annotations
    monkeypatch.setattr(annotations, "_HAS_CUDA_BINDINGS", True)
    monkeypatch.setattr(annotations, "_tools_id_available", True)
    with plain_torch():
        assert not annotations._is_tools_id_unavailable()
    assert annotations._is_tools_id_unavailable()
    x = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, enable_annotations=True), annotations.mark_kernels("part"):
        y = x + 1
    graph.replay()
    assert y.tolist() == [2.0, 2.0] and not annotations.get_kernel_annotations()


@ALONE
def test_a_replay_draws_from_the_states_of_the_capture() -> None:
    with torchdevice.simulate():
        generator, graph = torch.cuda.default_generators[0], torch.cuda.CUDAGraph()
        generator.manual_seed(1)
        old, new = generator.graphsafe_get_state(), generator.clone_state().manual_seed(2)
        expected = [
            torch.rand(2, device="cuda", generator=torch.Generator("cuda").manual_seed(s))
            for s in (1, 2)
        ]
        for each in (old, new):
            graph.register_generator_state(each)
        with torch.cuda.graph(graph):
            generator.graphsafe_set_state(new)
            second = torch.rand(2, device="cuda", generator=generator)
            generator.graphsafe_set_state(old)
            first = torch.rand(2, device="cuda", generator=generator)
        assert (old.get_offset(), new.get_offset()) == (0, 0)
        graph.replay()
        assert [first.tolist(), second.tolist()] == [each.tolist() for each in expected]
        assert (old.get_offset(), new.get_offset()) == (4, 4)
        graph.replay()
        assert first.tolist() != expected[0].tolist() and (old.get_offset(), new.get_offset()) == (
            8,
            8,
        )


def drawn(seed: int, x: torch.Tensor) -> list[torch.Tensor]:
    """Return a random program's results, some overwritten: floats, integers, views and lists."""
    draw = random.Random(seed)
    held = [x, x * 0.5, x.long()]
    for _ in range(25):
        a, b = draw.choice(held), draw.choice(held)
        number = draw.choice([2, 0.25])
        calls: list[Any] = [
            lambda a, b, n: a + b,
            lambda a, b, n: torch.mul(a, n),
            lambda a, b, n: a.t() @ b.to(a.dtype),
            lambda a, b, n: a.exp().clamp(-n, n),
            lambda a, b, n: torch.add(a.float(), b, alpha=2),
            lambda a, b, n: a.mul_(2),
            lambda a, b, n: a[1:].sub_(1),
            lambda a, b, n: a.sum(0, keepdim=True).expand(4, 4),
            lambda a, b, n: torch.cat([a, b])[::2].contiguous(),
            lambda a, b, n: a.argsort(),
            lambda a, b, n: torch.where(a > 0, a, b),
            lambda a, b, n: torch.addmm(a.float(), b.float(), a.float().t(), beta=n),
            lambda a, b, n: a.sort(dim=1)[0],
            lambda a, b, n: torch.nn.functional.layer_norm(a.float(), (4,)),
            lambda a, b, n: torch.softmax(a.double(), -1).float(),
            lambda a, b, n: a.copy_(b),
            lambda a, b, n: torch.max(a.float(), b.float(), out=torch.empty(4, 4, device="cuda")),
            lambda a, b, n: torch.full((4, 4), n, device="cuda"),
        ]
        call = draw.choice(calls)
        with contextlib.suppress(RuntimeError):  # such as a write to expanded memory
            held.append(call(a, b, number))
    return held


@pytest.mark.parametrize("seed", range(12))
def test_a_replay_of_any_program_gives_its_bits(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 4, generator=generator).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = drawn(seed, x)
    for _ in range(3):
        values = torch.randn(4, 4, generator=generator).cuda()
        x.copy_(values)
        graph.replay()
        expected = drawn(seed, values)
        assert len(results) == len(expected)
        for one, other in zip(results[1:], expected[1:], strict=True):
            assert one.dtype == other.dtype and same_bits(one, other)


def test_a_replay_of_products_calls_no_kernel_that_allocates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = network()
    x, _ = batches(1)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model[0](x).relu_().mul(2)
    x.copy_(batches(2)[1][0])
    monkeypatch.setattr(graph_capture._Step, "run", None)
    graph.replay()
    with torch.no_grad():
        assert same_bits(y, model[0](x).relu_().mul(2))


@pytest.mark.parametrize("native", ["never", "auto"])
def test_storages_that_are_resized_in_a_capture(native: str) -> None:
    """As FSDP frees its parameters' memory. A graph goes on using the captured memory."""
    with torchdevice.simulate("cuda", native=native):
        for begins_empty in (False, True):
            x, y = torch.arange(5000.0, device="cuda"), torch.zeros(5000, device="cuda")
            storage, graph = x.untyped_storage(), torch.cuda.CUDAGraph()
            size = storage.nbytes()
            if begins_empty:
                storage.resize_(0)
            with torch.cuda.graph(graph):
                storage.resize_(0)
                storage.resize_(size)
                y.copy_(x.fill_(3))
                storage.resize_(0)
            others = [
                torch.full((5000,), 7.0, device="cuda") for _ in range(8)
            ]  # in memory that the graph must not use
            for _ in range(2):
                y.zero_()
                graph.replay()
                assert storage.nbytes() == 0 and torch.equal(y.cpu(), torch.full((5000,), 3.0))
            assert all(torch.equal(each.cpu(), torch.full((5000,), 7.0)) for each in others)


def test_a_cpu_target_refuses_a_graph_over_freed_memory() -> None:
    with torchdevice.portable(target="cpu"):
        x = torch.arange(5000.0, device="cuda")
        with (
            pytest.raises(NotSupportedError, match="Run the program without CUDA graphs"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            x.mul_(2)
            x.untyped_storage().resize_(0)
