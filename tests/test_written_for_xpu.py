"""Programs written for Intel's XPU, on the CPU and on simulated devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchdevice


@pytest.fixture
def xpu(target: str) -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target, devices=2, written_for="xpu") as scope:
        yield scope


def test_what_is_available(xpu: torchdevice.Scope, kind: str) -> None:
    assert torch.xpu.is_available() and torch.xpu.device_count() == 2 and torch.xpu.is_initialized()
    assert not torch.cuda.is_available() and torch.backends.mps.is_available() is (kind == "mps")
    assert torch.xpu.get_device_name() and torch.xpu.get_device_properties(1).total_memory > 0
    assert torch.xpu.is_bf16_supported() and torch.get_device_module("xpu") is torch.xpu
    assert torch.get_device_module(torch.device("xpu:1")) is torch.xpu
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None and accelerator.type == "xpu"


def test_nothing_of_it_stays(target: str) -> None:
    with torchdevice.portable(target, written_for="xpu"):
        assert torch.xpu.device_count() >= 1
    assert not torch.xpu.is_available() and not torch.xpu.is_initialized()
    with torchdevice.portable(target):
        assert not torch.xpu.is_available()


def test_devices_and_random_numbers(xpu: torchdevice.Scope, kind: str) -> None:
    with torch.xpu.device(1):
        assert torch.xpu.current_device() == 1
    assert torch.xpu.current_device() == 0 and torch.ones(2, device="xpu:1").xpu().device.type == kind
    for seed in (torch.xpu.manual_seed, torch.xpu.manual_seed_all):
        seed(3)
        state, first = torch.xpu.get_rng_state(), torch.rand(3, device="xpu")
        seed(3)
        assert torch.equal(first, torch.rand(3, device="xpu"))
        torch.xpu.set_rng_state(state)
        assert torch.equal(first, torch.rand(3, device="xpu"))
    torch.xpu.synchronize()
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.xpu.synchronize(5)


def test_memory(xpu: torchdevice.Scope) -> None:
    before = torch.xpu.memory_allocated()
    kept = torch.ones(1 << 20, device="xpu")
    assert torch.xpu.memory_allocated() - before >= 0.9 * kept.nbytes
    assert torch.xpu.max_memory_allocated() >= torch.xpu.memory_allocated() and torch.xpu.memory_stats()
    free, total = torch.xpu.mem_get_info()
    assert 0 < free <= total
    torch.xpu.reset_peak_memory_stats()
    torch.xpu.empty_cache()


def test_streams_and_events(xpu: torchdevice.Scope) -> None:
    stream = torch.xpu.Stream(1)
    assert isinstance(stream, torch.xpu.Stream) and isinstance(stream, torch.Stream)
    assert not isinstance(stream, torch.cuda.Stream)
    with torch.xpu.stream(stream):
        assert torch.xpu.current_stream() == stream and torch.xpu.current_device() == 1
    start, end = (torch.xpu.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0 and isinstance(stream.record_event(), torch.xpu.Event)
    with pytest.raises(ValueError, match="Expected a xpu device"):
        torch.xpu.Stream(torch.device("meta"))


def test_a_training_step(xpu: torchdevice.Scope, kind: str) -> None:
    model = torch.nn.Linear(4, 2).to("xpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("xpu", dtype=torch.bfloat16):
        loss = model(torch.ones(3, 4, device="xpu")).float().square().mean()
    loss.backward()
    optimizer.step()
    assert next(model.parameters()).device.type == kind
