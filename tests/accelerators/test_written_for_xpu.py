"""Programs written for Intel's XPU, on the CPU and on simulated devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torchdevice
from torchdevice.errors import NotSupportedError


@pytest.fixture
def xpu(target: str) -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target, devices=2, written_for="xpu") as scope:
        yield scope


@pytest.mark.usefixtures("no_collections")
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
    assert (
        torch.xpu.current_device() == 0 and torch.ones(2, device="xpu:1").xpu().device.type == kind
    )
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


@pytest.mark.usefixtures("no_collections")
def test_memory(xpu: torchdevice.Scope) -> None:
    before = torch.xpu.memory_allocated()
    kept = torch.ones(1 << 20, device="xpu")
    assert torch.xpu.memory_allocated() - before >= 0.9 * kept.nbytes
    assert (
        torch.xpu.max_memory_allocated() >= torch.xpu.memory_allocated()
        and torch.xpu.memory_stats()
    )
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


@pytest.mark.usefixtures("no_collections")
def test_properties(target: str, kind: str) -> None:
    """They have XPU's fields, and torch's cache of them does not outlive the scope."""
    before = torch.xpu.get_device_capability.cache_info()
    with torchdevice.portable(
        target, written_for="xpu", properties={"name": "an XPU", "L2_cache_size": 7}
    ):
        properties = torch.xpu.get_device_properties()
        assert properties.name == "an XPU" and properties.total_memory > 0
        assert properties.has_fp64 is (kind != "mps") and properties.is_integrated_gpu in (
            True,
            False,
        )
        assert not hasattr(properties, "warp_size") and repr(properties).startswith(
            "_XpuDeviceProperties(name='an XPU'"
        )
        assert isinstance(properties, torch.xpu._XpuDeviceProperties)
        assert torch.xpu.get_device_capability()["sub_group_sizes"] == (16, 32)
    with torchdevice.portable(target, written_for="xpu", properties={"name": "another"}):
        assert torch.xpu.get_device_capability(0)["name"] == "another"
    assert torch.xpu.get_device_capability.cache_info() == before


def test_handles(xpu: torchdevice.Scope, kind: str) -> None:
    stream, event = torch.xpu.Stream(priority=-9), torch.xpu.Event()
    assert (
        stream.priority == -1
        and torch.xpu.Stream.priority_range() == (1, -1)
        and event.sycl_event == 0
    )
    assert repr(stream) == f"<torch.xpu.Stream device=xpu:0 stream_id={stream.stream_id}>"
    assert repr(event) == "<torch.xpu.Event uninitialized>"
    event.record(stream)
    with pytest.raises(TypeError):
        torch.xpu.Event(blocking=True)
    if kind == "simulated":
        assert (
            torch.xpu.get_stream_from_external(stream.sycl_queue) == stream and event.sycl_event > 0
        )
        return
    with pytest.raises(
        NotSupportedError, match=r"torch\.xpu\.Stream\.sycl_queue .* no sycl::queue"
    ):
        int(stream.sycl_queue)
    with pytest.raises(NotSupportedError, match=r"torch\.xpu\.Event\.sycl_event .* no sycl::event"):
        _ = event.sycl_event
    with pytest.raises(NotSupportedError, match=r"torch\.xpu\.get_stream_from_external"):
        torch.xpu.get_stream_from_external(1234)


@pytest.mark.skipif(not hasattr(torch.xpu, "XPUGraph"), reason="torch has no graphs of XPU")
def test_graphs_are_refused(xpu: torchdevice.Scope) -> None:
    for call in (torch.xpu.XPUGraph, torch.xpu.graph_pool_handle):
        with pytest.raises(NotSupportedError, match="no graph of SYCL"):
            call()
    assert not torch.xpu.is_current_stream_capturing()


@pytest.mark.skipif(not hasattr(torch.xpu, "MemPool"), reason="torch has no pools of XPU")
def test_pools(xpu: torchdevice.Scope, kind: str) -> None:
    if kind != "simulated":
        with pytest.raises(NotSupportedError, match=r"torch\.xpu\.MemPool"):
            torch.xpu.MemPool()
        return
    pool = torch.xpu.MemPool()
    assert isinstance(pool, torch.xpu.MemPool) and not isinstance(pool, torch.cuda.MemPool)
    with torch.xpu.use_mem_pool(pool):
        kept = torch.ones(100, device="xpu")
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert [
        block["requested_size"] for block in blocks if block["state"] == "active_allocated"
    ] == [kept.nbytes]
