"""``simulate(asynchronous=True)``: copies that go on; each mistake has a correct twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_program

import torchdevice
from torchdevice.errors import CopyInFlightError


@pytest.fixture
def cuda() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate(asynchronous=True) as scope:
        yield scope


def three() -> torch.Tensor:
    return torch.full((3,), 3.0, device="cuda")


def to_host() -> torch.Tensor:
    return three().to("cpu", non_blocking=True)


def to_pinned() -> torch.Tensor:
    return torch.empty(3).pin_memory().copy_(three(), non_blocking=True)


def to_part() -> torch.Tensor:
    return torch.empty(9).pin_memory()[3:6].copy_(three(), non_blocking=True)


def to_gaps() -> torch.Tensor:
    return torch.empty(3, 2).pin_memory()[:, 0].copy_(three(), non_blocking=True)


def event() -> None:
    torch.cuda.current_stream().record_event().synchronize()


WAITS: dict[str, Callable[[], Any]] = {
    "device": torch.cuda.synchronize,
    "stream": lambda: torch.cuda.current_stream().synchronize(),
    "event": event,
    "query": lambda: torch.cuda.current_stream().record_event().query(),
    "item": lambda: torch.ones(1, device="cuda").item(),
    "a blocking copy": lambda: torch.ones(1, device="cuda").cpu(),
    "a shape": lambda: torch.ones(1, device="cuda").nonzero(),
}


@pytest.mark.parametrize(
    "copy", [to_host, to_pinned, to_part, to_gaps], ids=lambda copy: copy.__name__
)
@pytest.mark.parametrize("wait", sorted(WAITS))
def test_to_the_host(cuda: torchdevice.Scope, copy: Callable[[], torch.Tensor], wait: str) -> None:
    values = copy()
    assert values.isnan().all()
    WAITS[wait]()
    assert values.tolist() == [3, 3, 3]


def test_a_wait_for_something_else(cuda: torchdevice.Scope) -> None:
    before = torch.cuda.current_stream().record_event()
    values = to_host()
    before.synchronize()
    torch.cuda.Stream().synchronize()
    assert values.isnan().all()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    side.synchronize()
    assert values.tolist() == [3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_garbage_of_numbers_is_nan(cuda: torchdevice.Scope, dtype: torch.dtype) -> None:
    assert three().to(dtype).to("cpu", non_blocking=True).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64])
def test_garbage_of_integers(cuda: torchdevice.Scope, dtype: torch.dtype) -> None:
    given = three().to(dtype)
    values = given.to("cpu", non_blocking=True)
    # .cpu() waits.
    assert not (values == given.cpu().clone()).any() or values.tolist() == given.tolist()
    values = given.to("cpu", non_blocking=True)
    assert values[0].item() != int(three().to(dtype)[0].bool()) * (1 if dtype is torch.bool else 3)
    torch.cuda.synchronize()
    assert values.tolist() == given.tolist()


@pytest.mark.usefixtures("no_collections")
def test_what_stays_blocking(cuda: torchdevice.Scope) -> None:
    assert torch.empty(3).copy_(three(), non_blocking=True).tolist() == [3, 3, 3]  # pageable
    assert three().to("cpu").tolist() == three().cpu().tolist() == [3, 3, 3]
    assert torch.empty(3).pin_memory().copy_(three()).tolist() == [3, 3, 3]
    source = torch.ones(3)
    x = source.to("cuda", non_blocking=True)
    source.fill_(2)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.usefixtures("no_collections")
def test_a_buffer_that_is_written_too_early(cuda: torchdevice.Scope) -> None:
    for wait in (False, True):
        buffer = torch.ones(3).pin_memory()
        batch = buffer.to("cuda", non_blocking=True)
        if wait:
            event()
        buffer.fill_(7)
        assert batch.tolist() == ([1, 1, 1] if wait else [7, 7, 7])


@pytest.mark.usefixtures("no_collections")
def test_a_buffer_that_is_written_after_its_use_was_submitted(cuda: torchdevice.Scope) -> None:
    buffer = torch.ones(3).pin_memory()
    there = torch.empty(3, device="cuda")
    there.copy_(buffer, non_blocking=True)
    result = there + 1
    buffer.fill_(7)
    with pytest.raises(
        CopyInFlightError, match=r"the copy to cuda:0 that began at .* on stream 0 was in fl"
    ) as caught:
        torch.cuda.synchronize()
    assert caught.value.site.file == __file__ and caught.value.stream == (0, 0)
    assert result.tolist() == [2, 2, 2]  # the device is not lost
    there.copy_(buffer, non_blocking=True)
    result = there + 1
    torch.cuda.synchronize()
    buffer.fill_(1)
    torch.cuda.synchronize()
    assert result.tolist() == [8, 8, 8]


@pytest.mark.usefixtures("no_collections")
def test_a_stream_that_does_not_wait(cuda: torchdevice.Scope) -> None:
    for wait in (False, True):
        side, buffer = torch.cuda.Stream(), torch.ones(3).pin_memory()
        with torch.cuda.stream(side):
            batch = buffer.to("cuda", non_blocking=True)
        if wait:
            torch.cuda.current_stream().wait_stream(side)
        result = (batch + 1).cpu()
        assert result.tolist() == [2, 2, 2] if wait else result.isnan().all()


@pytest.mark.usefixtures("no_collections")
def test_correct_programs(cuda: torchdevice.Scope) -> None:
    torch.manual_seed(0)
    loader = [(torch.rand(2, 4).pin_memory(), torch.rand(2, 1).pin_memory()) for _ in range(5)]
    losses: dict[bool, list[float]] = {}
    for asynchronous in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for x, y in loader:
            x, y = (each.to("cuda", non_blocking=asynchronous) for each in (x, y))
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach().to("cpu", non_blocking=asynchronous))
        torch.cuda.synchronize()
        losses[asynchronous] = [float(each) for each in found]
    assert losses[True] == losses[False]
    total = torch.zeros(2, 4, device="cuda")
    for batch in torchdevice.Prefetcher([x for x, _ in loader], "cuda:0"):
        total += batch
    assert torch.allclose(total.cpu(), sum(x for x, _ in loader))
    weight = torch.ones(3, requires_grad=True)
    (weight.pin_memory().to("cuda", non_blocking=True) * 2).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2, 2, 2]


@pytest.mark.usefixtures("no_collections")
def test_the_end_of_a_scope_finishes_copies() -> None:
    with torchdevice.simulate(asynchronous=True, races="error"):
        values = to_host()
        buffer = torch.ones(3).pin_memory()
        assert buffer[:2].is_pinned() and values.isnan().all()
    assert values.tolist() == [3, 3, 3]
    with torchdevice.simulate():
        assert to_host().tolist() == [3, 3, 3]


def test_the_ways_in(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="asynchronous='yes' is not a bool"):
        torchdevice.simulate(asynchronous="yes")
    with pytest.raises(
        ValueError, match="asynchronous=True needs a simulated device, and 'cpu' is not one"
    ):
        torchdevice.portable("cpu", asynchronous=True).__enter__()
    program = """
    import torch
    print(torch.ones(2, device="cuda").to("cpu", non_blocking=True))
    """
    result = run_program(
        tmp_path, program, options=["--target", "simulated:cuda", "--asynchronous"]
    )
    assert result.stdout == "tensor([nan, nan])\n", result.stderr
    result = run_program(tmp_path, program, TORCHDEVICE_TARGET="cpu", TORCHDEVICE_ASYNCHRONOUS="1")
    assert result.stdout == "tensor([1., 1.])\n", result.stderr
