"""CUDA graphs: a capture changes nothing visible; a replay has the captured calls' effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdevice

State = list[list[Any]]


@pytest.fixture(params=["cpu", "simulated:cuda"])
def scope(request: pytest.FixtureRequest) -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(request.param) as scope:
        yield scope


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, device="cuda")


def batch_norm(x: torch.Tensor) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    layer = torch.nn.BatchNorm1d(3).cuda()
    return lambda: layer(x), list(layer.state_dict().values())


def batch_norm_backward(x: torch.Tensor) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).cuda()
    return lambda: layer(x).square().sum().backward(), list(layer.state_dict().values())


def instance_norm(x: torch.Tensor) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    layer = torch.nn.InstanceNorm1d(3, track_running_stats=True).cuda()
    return lambda: layer(x.view(2, 3, 2)), list(layer.state_dict().values())


def undeclared(x: torch.Tensor) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """An operator that writes to an argument undeclared by its schema, in memory next to NaN."""
    memory = torch.full((3, 6), float("nan"), device="cuda")
    part = memory[:, 3]
    part.zero_()
    one = torch.ones(3, device="cuda")

    def step() -> torch.Tensor:
        return torch.ops.aten.native_batch_norm(x, None, None, part, one, True, 0.5, 1e-5)[0]

    return step, [memory, one]


def renormalised(x: torch.Tensor) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    layer = torch.nn.Embedding(4, 3, max_norm=0.5).cuda()
    indices = torch.tensor([1, 2], device="cuda")
    return lambda: layer(indices), [layer.weight.detach()]


def conjugate(x: torch.Tensor) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """An operator with arguments that have the conjugate bit."""
    state = torch.zeros(12, dtype=torch.complex64, device="cuda")
    turned = (x.flatten() * 1j).conj()
    return lambda: state.real.add_((turned + turned.imag).imag), [torch.view_as_real(state)]


STATEFUL = [batch_norm, batch_norm_backward, instance_norm, undeclared, renormalised, conjugate]


@pytest.mark.parametrize("made", STATEFUL)
def test_what_an_operator_writes_is_written_at_replay_only(
    scope: torchdevice.Scope, made: Any
) -> None:
    def values(state: list[torch.Tensor]) -> State:
        return [each.nan_to_num(-1.0).tolist() for each in state]

    def run(graphed: bool) -> list[State]:
        torch.manual_seed(0)
        x = torch.arange(12.0).view(4, 3).cuda()
        step, state = made(x)
        seen = [values(state)]
        graph = torch.cuda.CUDAGraph()
        if graphed:
            with torch.cuda.graph(graph):
                step()
            assert values(state) == seen[0], "the capture was seen"
        for number in (2.0, 5.0):
            x.mul_(number)
            graph.replay() if graphed else step()
            seen.append(values(state))
        assert seen[0] != seen[1]
        return seen

    assert run(True) == run(False)


# ---- tensors that change what they look at -------------------------------------------------------


def squeezed(x: torch.Tensor) -> torch.Tensor:
    y = (x + 1)[None]
    y = y * 2
    return y.squeeze_(0)


def squeezed_twice(x: torch.Tensor) -> torch.Tensor:
    return (x.view(1, 1, -1) * 2).squeeze_(0)


def transposed(x: torch.Tensor) -> torch.Tensor:
    y = x[:4].view(2, 2) * 1
    z = y + y.t()  # recorded with the shape before
    y.t_()
    return torch.cat([z.flatten(), y.flatten(), (y * 3).flatten()])


def used_before_and_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    first = y.view(1, -1) @ y.view(-1, 1)
    y.unsqueeze_(0)
    return (y.mT @ y + first).sum(0)


def resized(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, device="cuda")
    torch.mul(x, 3, out=out)
    return out + 1


def set_to_another(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = y * 2
    y.set_(z)
    return y + 1


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vector @ matrix": lambda x: x @ torch.eye(6, 4, device="cuda"),
    "matrix @ vector": lambda x: torch.eye(4, 6, device="cuda") @ x,
    "vector @ matrices": lambda x: x @ torch.eye(6, 4, device="cuda").expand(2, 6, 4),
    "vector @ vector": lambda x: x @ (x + 1),
    "squeeze_": squeezed,
    "squeeze_ of one of two": squeezed_twice,
    "t_": transposed,
    "unsqueeze_": used_before_and_after,
    "out=": resized,
    "set_": set_to_another,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_changed_in_place_stays_changed(scope: torchdevice.Scope, name: str) -> None:
    function, graph = SHAPES[name], torch.cuda.CUDAGraph()
    x = torch.arange(6.0).cuda()
    with torch.cuda.graph(graph):
        y = function(x)
    for number in (2.0, 7.0):
        x.mul_(number).add_(1)
        graph.replay()
        expected = function(x)
        assert y.shape == expected.shape and torch.equal(y, expected)


def test_tensors_that_the_program_transposes_after_the_capture(scope: torchdevice.Scope) -> None:
    x, graph = torch.arange(6.0).view(2, 3).cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    x.t_(), y.t_()
    x.mul_(2)
    graph.replay()
    assert y.shape == (3, 2) and torch.equal(y, x + 1)


# ---- generators ----------------------------------------------------------------------------------


def test_a_registered_generator(scope: torchdevice.Scope) -> None:
    generator, graph = torch.Generator("cuda").manual_seed(3), torch.cuda.CUDAGraph()
    expected = [torch.rand(4, device="cuda", generator=generator).tolist() for _ in range(3)]
    generator.manual_seed(3)
    graph.register_generator_state(generator)
    before = generator.get_state()
    with torch.cuda.graph(graph):
        noise = torch.rand(4, device="cuda", generator=generator)
    assert torch.equal(generator.get_state(), before), "the capture drew"
    found = []
    for _ in range(2):
        graph.replay()
        found.append(noise.tolist())
    assert [*found, torch.rand(4, device="cuda", generator=generator).tolist()] == expected
    generator.manual_seed(3)
    graph.replay()
    assert noise.tolist() == expected[0], "seeding it again is seen by the graph"


def test_two_graphs_of_one_generator_and_the_default_one(scope: torchdevice.Scope) -> None:
    def program(graphed: bool) -> State:
        torch.manual_seed(1)
        generator = torch.Generator("cuda").manual_seed(2)
        x = ones(3)

        def draw() -> torch.Tensor:
            return x.uniform_(generator=generator) + torch.rand(3, device="cuda")

        steps = [lambda: draw().tolist() for _ in range(2)]
        if graphed:
            graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
            outs = []
            for graph in graphs:
                graph.register_generator_state(generator)
                with torch.cuda.graph(graph):
                    outs.append(draw())
            assert x.tolist() == [1.0] * 3
            steps = [
                lambda graph=graph, out=out: (graph.replay(), out.tolist())[1]
                for graph, out in zip(graphs, outs, strict=True)
            ]
        return [steps[number]() for number in (0, 1, 1, 0)]

    assert program(True) == program(False)


def test_a_generator_that_is_not_registered() -> None:
    """On a simulated device torch's error is raised, and the capture goes on."""
    with torchdevice.simulate():
        generator, graph = torch.Generator("cuda"), torch.cuda.CUDAGraph()
        before = generator.get_state()
        with torch.cuda.graph(graph):
            with pytest.raises(RuntimeError, match="not in capture mode"):
                torch.rand(4, device="cuda", generator=generator)
            x = torch.ones(2, device="cuda")
        assert torch.equal(generator.get_state(), before)
        graph.replay()
        assert x.tolist() == [1.0, 1.0]
        cpu = torch.Generator().manual_seed(0)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.rand(4, generator=cpu)  # a generator of the CPU needs no registration


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [batch_norm, renormalised])
def test_an_exception_undoes_what_was_written(scope: torchdevice.Scope, made: Any) -> None:
    step, state = made(torch.arange(12.0).view(4, 3).cuda())
    before = [each.tolist() for each in state]
    with pytest.raises(KeyError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()
        raise KeyError
    assert [each.tolist() for each in state] == before
    step()
    assert [each.tolist() for each in state] != before


def test_a_state_that_a_capture_restores_is_restored_by_each_replay() -> None:
    with torchdevice.simulate():
        generator, graph = torch.cuda.default_generators[0], torch.cuda.CUDAGraph()
        torch.cuda.manual_seed(3)
        with torch.cuda.graph(graph):
            state = torch.cuda.get_rng_state()
            one = torch.rand(4, device="cuda")
            torch.cuda.set_rng_state(state)
            again, next_one = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
        assert generator.get_offset() == 0, "a capture draws nothing"
        seen = []
        for _ in range(3):
            graph.replay()
            assert torch.equal(one, again) and not torch.equal(one, next_one)
            seen += [one.tolist(), next_one.tolist()]
        torch.cuda.manual_seed(3)
        assert seen == [torch.rand(4, device="cuda").tolist() for _ in range(6)]


def test_a_capture_may_name_its_own_seed_again_and_no_other() -> None:
    with torchdevice.simulate():
        torch.cuda.manual_seed(3)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.cuda.manual_seed(3)
            assert torch.cuda.initial_seed() == 3
            with pytest.raises(
                RuntimeError, match="only if new seed is the same as the original seed"
            ):
                torch.cuda.manual_seed(4)
            with pytest.raises(
                RuntimeError, match="Cannot call CUDAGeneratorImpl::seed during CUDA graph capture"
            ):
                torch.cuda.seed()
            torch.ones(1, device="cuda")
