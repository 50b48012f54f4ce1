"""A plan counts what CUDA graphs keep: their private pools, as a simulated GPU with values does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchdevice

pytestmark = [pytest.mark.one_engine, pytest.mark.usefixtures("no_collections")]

WITHOUT_VALUES = {"compute": "meta", "values": "assume"}


def layers() -> nn.Module:
    """Layers of which one writes to its statistics without declaring it."""
    return nn.Sequential(
        nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 512)
    ).to("cuda")


def inference() -> list[Any]:
    """A chain in which each tensor is dropped as soon as the next one is there."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to("cuda")
    x = torch.randn(1024, 512, device="cuda")
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(model(model(x)))
    return [model, x, y, graph]


def training() -> list[Any]:
    model, x = layers(), torch.randn(256, 512, device="cuda", requires_grad=True)
    return [model, x, torch.cuda.make_graphed_callables(model, (x,))]


def half_precision() -> list[Any]:
    model, x = layers().bfloat16(), torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    return [model, x, graph]


def figures(program: Callable[[], list[Any]], **options: Any) -> Any:
    """Return what a program has allocated and reserved, at most and now, and its segments."""
    with torchdevice.simulate(**options):
        kept = program()
        pools = sorted(
            (each["segment_pool_id"] != (0, 0), each["total_size"])
            for each in torch.cuda.memory_snapshot()
        )
        found = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
            torch.cuda.memory_allocated(),
        )
        del kept
        return *found, pools


@pytest.mark.parametrize("program", [inference, training, half_precision])
def test_a_plan_counts_a_graphs_pool_as_a_run_does(program: Callable[[], list[Any]]) -> None:
    planned = figures(program, **WITHOUT_VALUES)
    assert planned == figures(program)
    assert any(is_private for is_private, *_ in planned[-1])


@pytest.mark.parametrize("program", [inference, half_precision])
def test_replays_take_no_memory(program: Callable[[], list[Any]]) -> None:
    with torchdevice.simulate(**WITHOUT_VALUES):
        kept = program()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        kept[-1].replay()
        assert torch.cuda.memory_stats() == before


def test_replays_count_what_has_values() -> None:
    with torchdevice.simulate(**WITHOUT_VALUES):
        x, count = torch.ones(8, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x *= 2
            count += 1
        assert count.tolist() == [0] * 4
        for _ in range(3):
            graph.replay()
        assert count.tolist() == [3] * 4


def test_a_graph_in_a_program_that_is_planned() -> None:
    found = torchdevice.plan(training)
    assert found["finished"] and found["error"] is None
