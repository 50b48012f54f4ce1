"""The host's memory behind a simulated device's tensors is released when these end."""

from __future__ import annotations

import _thread
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

import torchdevice
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.block_allocation import Blocks

SIZE = 64 << 20


def size_of_process() -> int:
    """Return this process's resident bytes."""
    return int(psutil.Process().memory_info().rss)


def made() -> torch.Tensor:
    """Return a tensor of :data:`SIZE` bytes."""
    return torch.ones(SIZE, dtype=torch.uint8, device="cuda")


def resized() -> Any:
    tensor = made()
    tensor.untyped_storage().resize_(0)
    return tensor


def grown() -> Any:
    tensor = torch.ones(1, dtype=torch.uint8, device="cuda")
    tensor.untyped_storage().resize_(SIZE)
    return tensor.set_(tensor.untyped_storage(), 0, (SIZE,)).fill_(1)


def in_a_graph() -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = made().add_(1)
    return graph, result


def in_a_caught_error() -> Any:
    tensor = made()
    try:
        tensor @ torch.ones(3, device="cuda")
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def saved_for_backward() -> Any:
    x = torch.ones(SIZE // 4, device="cuda", requires_grad=True)
    return (x * x).sum()


def in_a_cycle() -> Any:
    cycle: list[Any] = [made()]
    cycle.append(cycle)
    return cycle


MAKERS: list[Callable[[], Any]] = [
    *[made, resized, grown, in_a_graph, in_a_caught_error, saved_for_backward, in_a_cycle],
    lambda: made().view(2, -1)[1],
    lambda: torch.nn.Linear(4096, 4096, device="cuda"),
    lambda: made().cpu(),
]


@pytest.fixture(params=MAKERS, ids=[each.__name__ + str(i) for i, each in enumerate(MAKERS)])
def make(request: pytest.FixtureRequest, no_collections: None) -> Iterator[Callable[[], Any]]:
    """A function that returns what has much memory, after what it needs was made once."""
    with torchdevice.simulate():
        request.param()
        gc.collect()
        torch.ones(1, device="cuda")  # releases what has ended before
    yield request.param


def ended(kept: list[Any]) -> None:
    """Drop what is kept, and what only a collection finds."""
    is_cycle = isinstance(kept[0], list)
    kept.clear()
    if is_cycle:
        gc.collect()


def test_in_the_scope(make: Callable[[], Any]) -> None:
    with torchdevice.simulate():
        before = size_of_process()
        kept = [make()]
        ended(kept)
        assert size_of_process() - before < SIZE // 2


def test_after_the_scope(make: Callable[[], Any]) -> None:
    before = size_of_process()
    with torchdevice.simulate():
        kept = [make()]
    ended(kept)
    assert size_of_process() - before < SIZE // 2


def test_in_another_thread(make: Callable[[], Any]) -> None:
    with torchdevice.simulate():
        before = size_of_process()
        kept = [make()]
    thread = threading.Thread(target=ended, args=(kept,))
    thread.start()
    thread.join()
    assert size_of_process() - before < SIZE // 2


def test_small_tensors_at_the_end_of_the_scope() -> None:
    with torchdevice.simulate(native="never"):
        many = [torch.ones(3, device="cuda") for _ in range(9)]
        del many
        assert Blocks.ended
    assert not Blocks.ended


def test_an_interrupt_while_memory_is_released_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    with torchdevice.simulate(native="never"):  # C++ releases without a step of Python
        on = storages.device(0)
        x = made()
        with monkeypatch.context() as patch:
            patch.setattr(_thread, "interrupt_main", lambda: asked.append("again"))
            patch.setattr(type(on), "release_ended", _interrupted)
            del x
        assert asked == ["again"]
        y = made()
        assert torch.cuda.memory_allocated() == y.nbytes


def _interrupted(on: object) -> None:
    raise KeyboardInterrupt
