"""``simulate(races=...)``: each kind of race with its correct twin, and programs that have none."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_program
from torch import nn

import torchdevice
from torchdevice.errors import RaceError, RaceWarning
from torchdevice.kernel import thread_state

N = 64


@pytest.fixture
def cuda() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate(count=2, races="error") as scope:
        yield scope


def other() -> Any:
    return torch.cuda.Stream()


def main() -> Any:
    return torch.cuda.current_stream()


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*(shape or (N,)), device="cuda")


def write_then_read(wait: bool) -> None:
    side, x = other(), rand()
    if wait:
        side.wait_stream(main())
    with torch.cuda.stream(side):
        x + 1


def read_then_write(wait: bool) -> None:
    side, x = other(), rand()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        x + 1
    if wait:
        main().wait_stream(side)
    x.add_(1)


def write_then_write(wait: bool) -> None:
    side, x = other(), rand()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        x.fill_(1)
    if wait:
        main().wait_stream(side)
    x.fill_(2)


def out_argument(wait: bool) -> None:
    side, x = other(), rand()
    if wait:
        side.wait_stream(main())
    with torch.cuda.stream(side):
        torch.mul(x, 5, out=x)


def event(wait: bool) -> None:
    side, x, done = other(), rand(), torch.cuda.Event()
    done.record()
    if wait:
        side.wait_event(done)
    with torch.cuda.stream(side):
        x + 1


def event_recorded_too_early(wait: bool) -> None:
    side, done = other(), torch.cuda.Event()
    x = rand()
    if not wait:
        done.record()
    x.mul_(2)
    if wait:
        done.record()
    with torch.cuda.stream(side):
        done.wait()
        x + 1


def event_of_a_third_stream(wait: bool) -> None:
    side, third, x, done = other(), other(), rand(), torch.cuda.Event()
    if wait:
        third.wait_stream(main())
    done.record(third)
    side.wait_event(done)
    with torch.cuda.stream(side):
        x + 1


def host_waits_for_stream(wait: bool) -> None:
    side, x = other(), rand()
    if wait:
        main().synchronize()
    with torch.cuda.stream(side):
        x + 1


def host_waits_for_event(wait: bool) -> None:
    side, x = other(), rand()
    done = main().record_event()
    if wait:
        done.synchronize()
    with torch.cuda.stream(side):
        x + 1


def host_asks_event(wait: bool) -> None:
    side, x = other(), rand()
    done = main().record_event()
    if wait:
        assert done.query()
    with torch.cuda.stream(side):
        x + 1


def host_waits_for_device(wait: bool) -> None:
    side, x = other(), rand()
    torch.cuda.synchronize(0 if wait else 1)
    with torch.cuda.stream(side):
        x + 1


def host_waits_by_item(wait: bool) -> None:
    side, x = other(), rand()
    if wait:
        x.sum().item()
    with torch.cuda.stream(side):
        x + 1


def host_waits_by_nonzero(wait: bool) -> None:
    side, x = other(), rand()
    if wait:
        x.nonzero()
    with torch.cuda.stream(side):
        x + 1


def host_waits_by_a_copy(wait: bool) -> None:
    side, x = other(), rand()
    x.to("cpu", non_blocking=not wait)
    with torch.cuda.stream(side):
        x + 1


def prefetched_batch(wait: bool) -> None:
    side, host = other(), torch.rand(N).pin_memory()
    with torch.cuda.stream(side):
        x = host.to("cuda", non_blocking=True)
    if wait:
        main().wait_stream(side)
    x + 1


def blocking_batch(wait: bool) -> None:
    side, host = other(), torch.rand(N)
    with torch.cuda.stream(side):
        # Pageable memory is waited for.
        x = (host if wait else host.pin_memory()).to("cuda", non_blocking=True)
    x + 1


def view(wait: bool) -> None:
    side, x = other(), rand()
    if wait:
        main().synchronize()
    with torch.cuda.stream(side):
        x.view(8, 8)[2:4].t() + 1


def parts_of_a_tensor(apart: bool) -> None:
    side, x = other(), rand()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        x[: N // 2].fill_(1)
    x[N // 2 if apart else N // 2 - 1 :].fill_(2)


def freed_and_used_again(recorded: bool) -> None:
    side, x = other(), rand()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        x + 1
    if recorded:
        x.record_stream(side)
    del x
    rand()


def freed_after_a_wait(wait: bool) -> None:
    side, x = other(), rand()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        x + 1
    if wait:
        main().wait_stream(side)
    del x
    rand()


def optimizer_step(wait: bool) -> None:
    side, weights = other(), nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    weights(rand(2, 4)).sum().backward()
    if wait:
        side.wait_stream(main())
    with torch.cuda.stream(side):
        optimizer.step()


def two_devices(wait: bool) -> None:
    x = rand()
    y = torch.empty(N, device="cuda:1")
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        if wait:
            torch.cuda.current_stream("cuda:1").wait_stream(torch.cuda.default_stream("cuda:1"))
        y.copy_(x)
    with torch.cuda.device(1):
        if wait:
            torch.cuda.synchronize()
        y.add_(1)


def another_thread(wait: bool) -> None:
    x, found = rand(), []

    def work() -> None:
        try:
            with torch.cuda.stream(other()) as side:
                if wait:
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                x + 1
                del side
        except RaceError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if found:
        raise found[0]


KINDS: list[Callable[[bool], None]] = [
    write_then_read,
    read_then_write,
    write_then_write,
    out_argument,
    event,
    event_recorded_too_early,
    event_of_a_third_stream,
    host_waits_for_stream,
    host_waits_for_event,
    host_asks_event,
    host_waits_for_device,
    host_waits_by_item,
    host_waits_by_nonzero,
    host_waits_by_a_copy,
    prefetched_batch,
    blocking_batch,
    view,
    parts_of_a_tensor,
    freed_and_used_again,
    freed_after_a_wait,
    optimizer_step,
    two_devices,
    another_thread,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_race_and_its_correct_twin(cuda: torchdevice.Scope, kind: Callable[[bool], None]) -> None:
    with pytest.raises(RaceError) as caught:
        kind(False)
    error = caught.value
    assert error.earlier.site.file == error.later.site.file == __file__
    assert error.earlier.site != error.later.site and error.earlier.stream != error.later.stream
    assert (
        str(error.earlier.site) in str(error)
        and str(error.later.site) in str(error)
        and error.remedy in str(error)
    )
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    kind(True)


def test_the_report() -> None:
    with torchdevice.simulate(races="error"):
        x = rand()
        with torch.cuda.stream(other()) as _, pytest.raises(RaceError) as caught:
            x.mul_(2)
    text = str(caught.value)
    number = caught.value.later.stream[1]
    assert text.startswith(f"mul_ writes memory on stream {number} of cuda:0 at {__file__}:")
    assert (
        "in test_the_report, and nothing orders it after the earlier access: uniform_ writes "
        "memory on the" in text
    )
    assert (
        f"let stream {number} of cuda:0 wait: call its wait_stream() with the default stream of "
        "cuda:0" in text
    )


def test_a_warning_for_each_pair_of_lines() -> None:
    with torchdevice.simulate(races="warn"):
        x, side = rand(), other()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                with torch.cuda.stream(side):
                    x.mul_(2)
                x.mul_(3)
    assert [each.category for each in caught] == [RaceWarning] * 3
    assert {each.filename for each in caught} == {__file__}


def test_nothing_is_looked_for_by_default() -> None:
    with torchdevice.simulate():
        context = thread_state.state.context
        assert (
            context is not None
            and not context.policy.asks
            and not context.devices.machine.observers
        )
        write_then_read(False)
    # The inner scope looks.
    with torchdevice.simulate(races=False), torchdevice.simulate(races="error"):
        with pytest.raises(RaceError):
            write_then_read(False)


@pytest.mark.usefixtures("no_collections")
def test_programs_without_races(cuda: torchdevice.Scope) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    side = other()
    for _ in range(3):
        side.wait_stream(main())
        with torch.cuda.stream(side):
            hidden = model(rand(3, 4))
        main().wait_stream(side)
        hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    loader = [torch.rand(2, 4).pin_memory() for _ in range(4)]
    total = torch.zeros(2, 4, device="cuda")
    for batch in torchdevice.Prefetcher(loader, "cuda:0"):
        total += batch
    assert torch.allclose(total.cpu(), sum(loader))
    one = nn.Linear(2, 2).to("cuda:0")
    two = nn.Linear(2, 2).to("cuda:1")
    two(one(rand(1, 2)).to("cuda:1")).sum().backward()


def test_the_ways_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="races='no' is not known"):
        torchdevice.simulate(races="no")
    with pytest.raises(ValueError, match="races='warn' needs a simulated device"):
        torchdevice.portable("cpu", races="warn").__enter__()
    monkeypatch.setenv("TORCHDEVICE_RACES", "error")
    with torchdevice.portable("cpu") as scope:
        assert scope.runtime.device_type == "cpu"
    with torchdevice.simulate(), pytest.raises(RaceError):
        write_then_read(False)
    monkeypatch.delenv("TORCHDEVICE_RACES")
    program = """
    import torch
    x = torch.rand(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.mul_(2)
    """
    result = run_program(
        tmp_path, program, options=["--target", "simulated:cuda", "--races", "error"]
    )
    assert result.returncode == 1 and "RaceError: mul_ writes memory on stream" in result.stderr, (
        result.stderr
    )
