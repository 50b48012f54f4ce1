"""How many frames of Python frequent calls take on simulated devices, of which each costs time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import counted_frames
import pytest
import torch

import torchdevice

pytestmark = pytest.mark.one_engine


def frames_of(call: Callable[[], Any]) -> list[str]:
    """Return Python functions run in a call but its own, after calls that warm it up."""
    for _ in range(3):
        call()
    return counted_frames.frames_of(call)[1:]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("memory", [None, "1GiB"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_frequent_calls_take_few_frames_of_python(engine: Any, memory: str | None) -> None:
    with torchdevice.simulate(engine=engine, memory=memory, native="never"):
        x, stream, event = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()

        def order() -> None:
            with torch.cuda.stream(stream):
                event.record()
                torch.cuda.current_stream().wait_event(event)

        calls: list[tuple[int, Callable[[], Any]]] = [
            # 2 of them release the result of the call before, and one keeps the number whole.
            (13, lambda: x + 1),
            (13, lambda: x.add_(1)),
            (22, lambda: torch.zeros(3, device="cuda")),
            (10, lambda: torch.cuda.memory_allocated()),
            (30, order),
        ]
        for most, call in calls:
            frames = frames_of(call)
            assert 0 < len(frames) <= most, frames


def test_a_scope_that_asks_something_slows_no_other() -> None:
    with torchdevice.simulate() as scope:
        x = torch.ones(4, device="cuda")
        alone = len(frames_of(lambda: x + 1))
        with torchdevice.simulate(races="warn"):
            assert len(frames_of(lambda: x + 1)) > alone
        assert len(frames_of(lambda: x + 1)) == alone and scope.journal is not None
