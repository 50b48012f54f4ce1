"""A replay repeats its calls' values, also where no CPU kernel writes to ``out``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import torchdevice

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "clone": torch.clone,
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 1),
    "std": lambda x: x.std(1),
    "trace": torch.trace,
    "mv": lambda x: x @ x[0],
    "rows": lambda x: x.t().relu(),
    "constant_pad_nd": lambda x: torch.nn.functional.pad(x, (1, 1)),
    "gelu": torch.nn.functional.gelu,
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    "celu": torch.nn.functional.celu,
    "prelu": lambda x: torch.nn.functional.prelu(x, x[0, :1]),
    "cdist": lambda x: torch.cdist(x, x),
    "where": lambda x: torch.where(x > 0, x, -x),
}


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    with torchdevice.simulate():
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_computes_as_the_call_does(name: str) -> None:
    function = FUNCTIONS[name]
    x = torch.randn(4, 4, device="cuda")
    function(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(x)
    for _ in range(3):
        x.copy_(torch.randn(4, 4))
        graph.replay()
        assert torch.equal(result, function(x))


def test_memory_without_values_keeps_what_the_program_wrote() -> None:
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept, like, new = torch.empty(4, device="cuda"), torch.empty_like(x), x.new_empty(4)
        total = kept + like + new + x
    for number, each in enumerate((kept, like, new)):
        each.fill_(number)
    for _ in range(2):
        graph.replay()
        assert total.tolist() == [4.0] * 4
