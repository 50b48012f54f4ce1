"""The profilers: device times are those of the target, and ranges of NVTX are shown."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

import torchdevice
from torchdevice.errors import FidelityError

MEASURED = pytest.mark.lacked_by(
    "simulated:mps", "device times, because its calls return before the work is done"
)


@pytest.fixture
def model(cuda: torchdevice.Scope) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    ).cuda()


def step(model: torch.nn.Module) -> None:
    torch.cuda.nvtx.range_push("forward")
    y = model(torch.ones(32, 64, device="cuda"))
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("backward"):
        y.sum().backward()
    torch.cuda.nvtx.mark("done")


def averages(profiler: Any) -> dict[str, Any]:
    return {event.key: event for event in profiler.key_averages()}


@MEASURED
@pytest.mark.parametrize(
    "activities", [{ProfilerActivity.CUDA}, {ProfilerActivity.CPU, ProfilerActivity.CUDA}, None]
)
def test_times_of_the_device(model: torch.nn.Module, activities: Any) -> None:
    with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        step(model)
    found = averages(profiler)
    product = found["aten::addmm"]
    assert 0 < product.self_device_time_total <= product.device_time_total
    assert found["forward"].device_time_total >= product.device_time_total
    assert found["forward"].self_device_time_total == 0
    for key in (
        "cuda_time_total",
        "self_cuda_time_total",
        "device_time_total",
        "self_device_time_total",
        "cpu_time",
    ):
        table = profiler.key_averages().table(sort_by=key, row_limit=50)
        assert "CUDA total" in table and "Self CUDA time total" in table and "aten::addmm" in table
    by_time = [event.key for event in profiler.key_averages()]
    by_time.sort(key=lambda key: -found[key].self_device_time_total)
    rows = profiler.key_averages().table(sort_by="self_cuda_time_total").splitlines()
    assert by_time[0] in rows[3]


def test_ranges_of_nvtx(model: torch.nn.Module, tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(model)
        started = torch.cuda.nvtx.range_start("free")
        torch.cuda.nvtx.range_end(started)
    assert {"forward", "backward", "done", "free"} <= averages(profiler).keys()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    names = {
        event.get("name")
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert {"forward", "backward", "aten::addmm"} <= names


def test_ranges_nest_per_thread(cuda: torchdevice.Scope) -> None:
    depths: list[int] = []
    assert torch.cuda.nvtx.range_push("outer") == 0
    thread = threading.Thread(target=lambda: depths.append(torch.cuda.nvtx.range_push("elsewhere")))
    thread.start()
    thread.join()
    assert depths == [0] and torch.cuda.nvtx.range_push("inner") == 1
    assert [torch.cuda.nvtx.range_pop() for _ in range(3)] == [1, 0, -2]


@MEASURED
def test_a_schedule(model: torch.nn.Module) -> None:
    ready: list[float] = []

    def note(profiler: Any) -> None:
        ready.append(sum(event.self_device_time_total for event in profiler.key_averages()))

    with profile(
        activities=[ProfilerActivity.CUDA],
        schedule=schedule(wait=1, warmup=1, active=2),
        on_trace_ready=note,
    ) as profiler:
        for _ in range(4):
            step(model)
            profiler.step()
    assert len(ready) == 1 and ready[0] > 0


@MEASURED
def test_the_autograd_profiler(model: torch.nn.Module) -> None:
    with torch.autograd.profiler.profile(use_device="cuda") as profiler:
        step(model)
    assert "CUDA total" in profiler.key_averages().table(sort_by="cuda_time_total")
    with torch.autograd.profiler.profile(enabled=False, use_device="cuda"):
        step(model)
    with torch.autograd.profiler.emit_nvtx():
        step(model)


@MEASURED
def test_events_are_read_after_the_scope(target: str) -> None:
    with torchdevice.portable(target), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    assert averages(profiler)["aten::mm"].device_time_total > 0


def test_a_profile_without_cuda_is_torchs_own(cuda: torchdevice.Scope) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    assert averages(profiler)["aten::mm"].device_time_total == 0


def test_no_warning_and_a_report(model: torch.nn.Module, cuda: torchdevice.Scope) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*CUDA.*")
        with profile(activities=[ProfilerActivity.CUDA]):
            step(model)
    assert any(entry.requested == "the profiler's CUDA activity" for entry in cuda.journal.entries)


@pytest.mark.parametrize(
    "plan", [None, schedule(wait=1, warmup=1, active=1, repeat=2)], ids=["no plan", "a plan"]
)
def test_the_report_names_the_line_that_made_the_profiler(
    plan: Any, cuda: torchdevice.Scope
) -> None:
    profiler = profile(activities=[ProfilerActivity.CUDA], schedule=plan)  # made here
    with profiler:
        for _ in range(6):
            profiler.step()
    (entry,) = (
        each for each in cuda.journal.entries if each.requested == "the profiler's CUDA activity"
    )
    assert Path(__file__).read_text().splitlines()[entry.site.line - 1].endswith("# made here")
    assert entry.count == 1


def test_strict_refuses(target: str) -> None:
    with torchdevice.portable(target, strict=True), pytest.raises(FidelityError, match="profiler"):
        with profile(activities=[ProfilerActivity.CUDA]):
            pass


def test_an_asynchronous_target_shows_no_cpu_times_as_device_times(
    model: torch.nn.Module, cuda: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime seems asynchronous, like MPS, whose times the profiler cannot measure."""
    monkeypatch.setattr(type(cuda.runtime), "is_asynchronous", True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(model)
    assert averages(profiler)["aten::addmm"].device_time_total == 0
    assert "aten::addmm" in profiler.key_averages().table(sort_by="cuda_time_total")
