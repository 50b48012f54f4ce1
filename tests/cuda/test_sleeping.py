"""``torch.cuda._sleep`` on a simulated device: finished streams and events, and who waits.

The clock of these tests moves only when somebody sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.simulation.observe import happens_before
from torchdevice.torch_modules.cuda import sleeping

SECOND = int(sleeping.CYCLES_PER_SECOND)


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    stopped = Clock()
    monkeypatch.setattr(sleeping, "time", stopped)
    monkeypatch.setattr(happens_before, "time", stopped)
    with torchdevice.simulate(count=2):
        yield stopped


def test_a_stream_is_busy_and_others_are_not(clock: Clock) -> None:
    side = torch.cuda.Stream()
    before = side.record_event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2 * SECOND)
        torch.cuda._sleep(SECOND)
    after = side.record_event()
    assert not side.query() and not after.query()
    assert torch.cuda.current_stream().query() and before.query()
    after.synchronize()
    assert clock.now == 103 and side.query() and after.query()
    side.synchronize()
    assert clock.now == 103


def test_who_waits_for_an_event_is_busy_too(clock: Clock) -> None:
    side, third = torch.cuda.Stream(), torch.cuda.Stream(1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SECOND)
    third.wait_stream(side)
    assert not third.query() and torch.cuda.current_stream().query()
    third.synchronize()
    assert clock.now == 101


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "device": lambda x: torch.cuda.synchronize(),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "item": lambda x: x.sum().item(),
    "copy": lambda x: x.cpu(),
    "pageable": lambda x: x.copy_(torch.ones(3)),
    "nonzero": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("wait", sorted(WAITS))
def test_the_host_waits(clock: Clock, wait: str) -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda._sleep(SECOND)
    assert not torch.cuda.current_stream().query()
    WAITS[wait](x)
    assert clock.now == 101 and torch.cuda.current_stream().query()


@pytest.mark.usefixtures("no_collections")
def test_the_host_does_not_wait(clock: Clock) -> None:
    x, pinned = torch.ones(3, device="cuda"), torch.ones(3).pin_memory()
    torch.cuda._sleep(SECOND)
    x + 1
    x.copy_(pinned, non_blocking=True)
    x.to("cpu", non_blocking=True)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        x.sum().item()
    assert clock.now == 100 and not torch.cuda.current_stream().query()


def test_times_between_events(clock: Clock) -> None:
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    torch.cuda._sleep(SECOND)
    middle.record()
    torch.cuda._sleep(2 * SECOND)
    end.record()
    with pytest.raises(RuntimeError, match=r"must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    # The time between the calls is added, which the clock of these tests does not show.
    assert start.elapsed_time(middle) == pytest.approx(1000, abs=500)
    assert middle.elapsed_time(end) == pytest.approx(2000, abs=500)


@pytest.fixture
def taking(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Any]:
    """Return a function that runs a kernel which takes so many seconds of the clock."""
    x = torch.ones(3, device="cuda")
    read = clock.perf_counter
    seconds = [0.0]
    # The recorder reads the clock before and after each kernel.
    monkeypatch.setattr(
        happens_before, "time", type("Times", (), {"perf_counter": staticmethod(lambda: read())})
    )

    def run(*given: float) -> None:
        seconds[:] = given
        moments = iter((clock.now, clock.now + seconds[0]))

        def perf_counter() -> float:
            clock.now = next(moments)
            return clock.now

        with monkeypatch.context() as patched:
            patched.setattr(happens_before.time, "perf_counter", staticmethod(perf_counter))
            x.mul_(1)

    return run


def test_work_queues_behind_work_of_its_stream(clock: Clock, taking: Any) -> None:
    begun = clock.now
    torch.cuda._sleep(SECOND)
    taking(0.5)
    done = torch.cuda.Event()
    done.record()
    assert clock.now == begun + 0.5 and not done.query()
    done.synchronize()  # half a second of it was spent computing
    assert clock.now == begun + 1.5 and done.query()


def test_streams_overlap(clock: Clock, taking: Any) -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for stream, seconds in ((one, 20), (other, 30)):
        with torch.cuda.stream(stream):
            taking(seconds)
    assert not one.query()
    for stream in (one, other):
        torch.cuda.current_stream().wait_stream(stream)
    end.record()
    end.synchronize()
    assert one.query() and other.query() and clock.now == 150  # the host computed both
    # Marks have the time of the machine, which has not moved by these seconds.
    assert start.elapsed_time(end) + 50_000 == pytest.approx(30_000, abs=500)


def test_a_scope_begins_without_sleepers(clock: Clock) -> None:
    torch.cuda._sleep(SECOND)
    with torchdevice.simulate("t4"):
        assert torch.cuda.current_stream().query()


def test_a_target_without_streams_sleeps_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchdevice.torch_modules.cuda import device_queries

    stopped = Clock()
    monkeypatch.setattr(device_queries, "time", stopped)
    with torchdevice.portable("cpu"):
        torch.cuda._sleep(SECOND)
        assert stopped.now == 101 and torch.cuda.current_stream().query()


def test_a_capture_after_a_sleep_waits_for_nothing() -> None:
    with torchdevice.simulate("a100"):
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2 + x  # products make new tensors, and a capture asks whether they wrote to `x`
        graph.replay()
        assert y.tolist() == [3.0] * 3
        with (
            pytest.raises(RuntimeError, match="during capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            x.sum().item()  # what the program reads itself
