"""``races=`` follows CUDA graphs' inputs and shared pools. A capture runs nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import GraphRaceError, RaceError, RaceWarning


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with torchdevice.simulate(races="error"):
        yield


def captured(work: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = work()
    return graph, result


def test_an_input_that_was_freed_is_told_at_the_replay() -> None:
    x = torch.ones(4, device="cuda")
    graph, _ = captured(functools.partial(torch.mul, x, 2))
    graph.replay()
    x = None
    with pytest.raises(
        GraphRaceError,
        match=r"replayed at .*test_graph_memory\.py:\d+ .* uses memory that was freed",
    ):
        graph.replay()


def test_an_input_that_was_freed_and_given_out_again_is_told() -> None:
    x = torch.ones(4, device="cuda")
    graph, _ = captured(lambda: x * 2)
    x = torch.zeros(4, device="cuda")
    with pytest.raises(GraphRaceError):
        graph.replay()


KEPT: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda result: result, torch.stack),
    (torch.detach, torch.cat),
    (lambda result: result[1:], lambda kept: torch.hstack(tuple(kept))),
    (lambda result: result.view(2, 2), torch.vstack),
]


@pytest.mark.parametrize(("keep", "join"), KEPT)
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_results_that_later_replays_have_overwritten_are_told_where_they_are_joined(
    keep: Callable[[Any], Any], join: Callable[[Any], Any], engine: Any
) -> None:
    with torchdevice.simulate(races="error", engine=engine):
        x = torch.ones(4, device="cuda")
        graph, result = captured(lambda: x * 2)
        kept, copies = [], []
        for _ in range(3):
            graph.replay()
            kept.append(keep(result))
        with pytest.raises(
            GraphRaceError, match=r"one result of a graph 3 times\. The graph was replayed 3"
        ):
            join(kept)
        for _ in range(3):
            graph.replay()
            copies.append(keep(result).clone())
        join(copies)


def test_one_result_may_be_repeated() -> None:
    x = torch.ones(4, device="cuda")
    graph, (result, twice) = captured(lambda: (x * 2, torch.cat([x * 3] * 2)))
    for _ in range(3):
        graph.replay()
        assert torch.cat([result] * 2).tolist() == [2] * 8
        assert twice.tolist() == [3] * 8
    assert torch.stack([result] * 5).shape == (5, 4)


def test_a_warning_lets_the_program_go_on() -> None:
    with torchdevice.simulate(races="warn"):
        x = torch.ones(4, device="cuda")
        graph, y = captured(functools.partial(torch.mul, x, 2))
        x = None
        with pytest.warns(RaceWarning, match="was freed after its capture"):
            graph.replay()
        assert y.tolist() == [2, 2, 2, 2]


def test_memory_that_the_graph_allocated_may_be_freed() -> None:
    x = torch.ones(4, device="cuda")
    graph, result = captured(lambda: ((x * 2) + 1).sum())
    del result
    graph.replay()


def test_a_module_that_is_trained_by_graphs_is_right() -> None:
    model = torch.nn.Linear(4, 4).cuda()
    graphed = torch.cuda.make_graphed_callables(
        model, (torch.randn(2, 4, device="cuda", requires_grad=True),)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        graphed(torch.randn(2, 4, device="cuda", requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("waits", [False, True])
def test_two_graphs_of_one_pool_must_not_overlap(waits: bool) -> None:
    x, pool = torch.ones(4, device="cuda"), torch.cuda.graph_pool_handle()
    graphs = [captured(lambda factor=factor: (x * factor).sum(), pool)[0] for factor in (2, 3)]
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        graphs[0].replay()
    if waits:
        other.wait_stream(one)
    with torch.cuda.stream(other):
        if waits:
            graphs[1].replay()
        else:
            with pytest.raises(RaceError, match="the graph writes memory on stream"):
                graphs[1].replay()


def test_two_graphs_with_pools_of_their_own_may_overlap() -> None:
    x = torch.ones(4, device="cuda")
    graphs = [captured(lambda factor=factor: (x * factor).sum())[0] for factor in (2, 3)]
    torch.cuda.synchronize()
    for graph in graphs:
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.replay()


def test_what_a_capture_recorded_orders_nothing_because_it_did_not_run() -> None:
    x, pool = torch.ones(4, device="cuda"), torch.cuda.graph_pool_handle()
    graphs = [captured(lambda factor=factor: x.mul_(factor).add(1), pool)[0] for factor in (2, 3)]
    x.fill_(5)  # on the default stream, which waits for no capture
    for graph in graphs:
        graph.replay()
    assert x.tolist() == [30, 30, 30, 30]


@pytest.mark.parametrize("order", ["abc", "abcabc", "acb", "abcacb", "acab", "acbb"])
@pytest.mark.parametrize("shares", [False, True], ids=["pools of their own", "one pool"])
def test_a_dropped_result_holds_until_another_graph_of_its_pool_has_its_memory(
    order: str, shares: bool
) -> None:
    """Graph ``b`` reads the result of ``a``. ``c`` has its memory if it shares the pool."""
    x, pool = torch.ones(4, device="cuda"), torch.cuda.graph_pool_handle()
    a, made = captured(lambda: x * 2, pool)
    b, result = captured(functools.partial(torch.add, made, 1), pool)
    made = None
    c, last = captured(lambda: x * 3, pool if shares else None)
    graphs, is_wrong = {"a": a, "b": b, "c": c}, "cb" in order and shares
    with pytest.raises(GraphRaceError) if is_wrong else contextlib.nullcontext():
        for each in order:
            graphs[each].replay()
    assert is_wrong or result.tolist() == [3, 3, 3, 3]
    assert last.shape == (4,)
