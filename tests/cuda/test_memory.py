"""Memory statistics, snapshots and the history, read by torch's own ``_memory_viz``."""

from __future__ import annotations

import os
import pickle
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Torch imports it in the middle of some first call, and so keeps the frames of that call.
import torch._dynamo
from torch.cuda import _memory_viz

import torchdevice
from torchdevice.errors import FidelityError
from torchdevice.torch_modules.cuda import memory_history

MIB = 2**20


@pytest.mark.usefixtures("no_collections")
def test_statistics_of_a_simulated_device_are_an_allocators() -> None:
    with torchdevice.simulate():
        torch.cuda.reset_accumulated_memory_stats()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        small = torch.empty(100, device="cuda")
        large = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        then = torch.cuda.memory_stats()
        change = {key: then[key] - before[key] for key in then}
        assert change["allocated_bytes.small_pool.current"] == 512 and change[
            "requested_bytes.all.current"
        ] == (400 + 3 * MIB)
        assert change["allocated_bytes.large_pool.current"] == 3 * MIB
        assert change["allocation.all.current"] == 2 == change["active.all.allocated"]
        assert then["reserved_bytes.all.current"] == torch.cuda.memory_reserved()
        assert then["reserved_bytes.all.current"] == sum(
            then[f"reserved_bytes.{pool}.current"] for pool in ("small_pool", "large_pool")
        )
        del small, large
        after = torch.cuda.memory_stats()
        assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
        assert (
            after["allocated_bytes.all.freed"] - before["allocated_bytes.all.freed"]
            == 3 * MIB + 512
        )
        assert after["allocation.all.peak"] == then["allocation.all.current"]
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0
        assert "Allocations" in torch.cuda.memory_summary()


@pytest.mark.usefixtures("no_collections")
def test_statistics_have_every_key_that_torch_reads(cuda: torchdevice.Scope) -> None:
    nested = torch.cuda.memory_stats_as_nested_dict()
    for name in ("allocation", "segment", "active", "inactive_split"):
        for stem in (name, f"{name}_bytes" if name != "allocation" else "allocated_bytes"):
            for pool in ("all", "small_pool", "large_pool"):
                if stem in nested:
                    assert set(nested[stem][pool]) == {"current", "peak", "allocated", "freed"}
    assert "num_ooms" in nested and "oversize_allocations" in nested
    for abbreviated in (True, False):
        assert "CUDA OOMs" in torch.cuda.memory_summary(abbreviated=abbreviated)


def _allocate(count: int) -> list[torch.Tensor]:
    return [torch.ones(300 + i, device="cuda") * 2 for i in range(count)]


@pytest.fixture
def recording(cuda: torchdevice.Scope) -> torchdevice.Scope:
    torch.cuda.memory._record_memory_history(stacks="python")
    return cuda


@pytest.mark.usefixtures("no_collections")
def test_history_names_the_lines_that_allocated(recording: torchdevice.Scope) -> None:
    kept = _allocate(3)
    del kept[0]
    snapshot = torch.cuda.memory._snapshot()
    events = snapshot["device_traces"][0]
    allocated = [e for e in events if e["action"] == "alloc"]
    assert sum(any(frame["name"] == "_allocate" for frame in e["frames"]) for e in allocated) == 6
    assert all("torchdevice/" not in frame["filename"] for e in allocated for frame in e["frames"])
    ours = {
        e["addr"] for e in allocated if any(frame["name"] == "_allocate" for frame in e["frames"])
    }
    freed = [e["addr"] for e in events if e["action"] == "free_completed" and e["addr"] in ours]
    assert len(freed) == 4  # the three results of torch.ones, and the result that was deleted
    live = {
        block["data_ptr"]: block for segment in snapshot["segments"] for block in segment["blocks"]
    }
    for tensor in kept:
        block = live[tensor.untyped_storage().data_ptr()]
        assert block["requested_size"] == tensor.nbytes and block["state"] == "active_allocated"
        assert any(frame["name"] == "_allocate" for frame in block["frames"])
        assert (
            torch._C._cuda_allocationTraceback(tensor.untyped_storage().data_ptr())
            == block["frames"]
        )
    assert torch._C._cuda_allocationTraceback(1) is None


@pytest.mark.usefixtures("no_collections")
def test_the_history_has_stacks_of_torchscript(cuda: torchdevice.Scope) -> None:
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(333, device="cuda")
    torch.cuda.memory._record_memory_history(stacks="python")
    kept = scripted(x)
    frames = torch._C._cuda_allocationTraceback(kept.untyped_storage().data_ptr())
    names = [frame["name"] for frame in frames]
    assert (
        names[0] == "scripted" and test_the_history_has_stacks_of_torchscript.__name__ in names[1:]
    )
    assert frames[0]["filename"] == __file__


@pytest.mark.usefixtures("no_collections")
@pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64"),
    reason="torch unwinds C++ on Linux x86-64 only",
)
@pytest.mark.one_engine
def test_the_history_has_stacks_of_cpp(cuda: torchdevice.Scope) -> None:
    x = torch.ones(333, device="cuda")
    found = {}
    for stacks in ("python", "all"):
        torch.cuda.memory._record_memory_history(stacks=stacks)
        kept = x * 2
        frames = torch._C._cuda_allocationTraceback(kept.untyped_storage().data_ptr())
        found[stacks] = [frame["name"] for frame in frames]
        assert not any(f"torchdevice{os.sep}cuda" in frame["filename"] for frame in frames)
    name = test_the_history_has_stacks_of_cpp.__name__
    assert name in found["python"] and not any("::mul" in each for each in found["python"])
    # torch may fail to unwind as far as the interpreter. Where Dynamo has set its evaluator, torch
    # counts the interpreter's frames, and places Python's too far inside.
    assert any("::mul" in each for each in found["all"])


@pytest.mark.usefixtures("no_collections")
@pytest.mark.one_engine
def test_a_history_without_cpp_where_torch_cannot_unwind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(python: bool, script: bool, cpp: bool) -> Any:
        if cpp:
            raise RuntimeError(
                "record_context_cpp is not support on non-linux non-x86_64 platforms"
            )
        return gather(python, script, cpp)

    gather = memory_history._gather
    monkeypatch.setattr(memory_history, "_gather", refuse)
    with torchdevice.simulate() as scope:
        torch.cuda.memory._record_memory_history(stacks="all")
        kept = torch.ones(333, device="cuda")
        frames = torch._C._cuda_allocationTraceback(kept.untyped_storage().data_ptr())
        assert frames[0]["filename"] == __file__
    assert any("stacks without C++" in str(each) for each in scope.report().rows)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("context", ["state", "alloc", "all"])
def test_a_returned_segment_has_a_stack_where_frees_have_one(context: str) -> None:
    with torchdevice.simulate():
        torch.cuda.memory._record_memory_history(context=context, stacks="python")
        kept = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
        del kept
        torch.cuda.empty_cache()
        events = {
            event["action"]: event for event in torch.cuda.memory._snapshot()["device_traces"][0]
        }
    assert bool(events["segment_alloc"]["frames"]) is (context != "state")
    assert bool(events["segment_free"]["frames"]) is (context == "all")


@pytest.mark.parametrize(
    "transform", [torch.vmap, torch.func.grad, lambda f: torch.vmap(torch.func.grad(f))]
)
def test_a_snapshot_inside_a_transform(recording: torchdevice.Scope, transform: Any) -> None:
    """The tensors that a transform hands to the function have no memory of their own."""
    x = torch.ones(311, device="cuda")

    def function(row: torch.Tensor) -> torch.Tensor:
        kept.append(torch.cuda.memory._snapshot())
        return row.sum()

    kept: list[Any] = []
    given = x if transform is torch.func.grad else x.unsqueeze(0)
    transform(function)(given)
    found = [block["data_ptr"] for segment in kept[0]["segments"] for block in segment["blocks"]]
    assert found.count(x.untyped_storage().data_ptr()) == 1


@pytest.mark.usefixtures("no_collections")
def test_a_snapshot_beside_a_trace(recording: torchdevice.Scope) -> None:
    """A functional tensor has no address, nor has one whose storage a compiler made to say so."""
    x = torch.ones(311, device="cuda")
    functional, fake = torch._to_functional_tensor(x), torch.ones(3, device="cuda")
    torch._C._set_throw_on_mutable_data_ptr(fake)
    found = [
        block["data_ptr"]
        for segment in torch.cuda.memory._snapshot()["segments"]
        for block in segment["blocks"]
    ]
    assert (*functional.shape, *fake.shape) == (311, 3) and found.count(
        x.untyped_storage().data_ptr()
    ) == 1


@pytest.mark.usefixtures("no_collections")
def test_a_dumped_snapshot_is_read_by_torchs_own_viewer(
    recording: torchdevice.Scope, tmp_path: Path
) -> None:
    kept = _allocate(4)
    path = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    snapshot = pickle.loads(path.read_bytes())
    drawn: list[str] = []
    _memory_viz.segments(snapshot, format_flamegraph=drawn.append)
    _memory_viz.memory(snapshot, format_flamegraph=drawn.append)
    assert (
        all("active_allocated" in text and "_allocate" in text for text in drawn)
        and len(drawn) == 2
    )
    assert "segments: " in _memory_viz.segsum(snapshot)
    assert "entries" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(
        snapshot
    ) or "viz" in _memory_viz.trace_plot(snapshot)
    assert len(kept) == 4


@pytest.mark.usefixtures("no_collections")
def test_what_is_recorded_can_be_chosen(recording: torchdevice.Scope) -> None:
    record = torch.cuda.memory._record_memory_history
    first = _allocate(2)
    record(max_entries=3, clear_history=True, context="alloc", stacks="python")
    second = _allocate(4)
    del first, second
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    assert [e["action"] for e in events] == ["free_completed", "free_requested", "free_completed"]
    assert all(e["frames"] == [] for e in events)
    record(enabled=None)
    third = _allocate(1)
    assert torch.cuda.memory._snapshot()["device_traces"][0] == []
    del third
    for bad in ({"enabled": "some"}, {"context": "none"}, {"stacks": "c"}):
        with pytest.raises(RuntimeError, match=r"expected (state|context|stacks) to be"):
            record(**bad)
    record(True, trace_alloc_max_entries=10, trace_alloc_record_context=True)
    kept = _allocate(1)
    assert torch._C._cuda_isHistoryEnabled() and torch.cuda.memory._snapshot()["device_traces"][0]
    record(False)
    assert not torch._C._cuda_isHistoryEnabled() and len(kept) == 1


@pytest.mark.usefixtures("no_collections")
def test_kinds_of_events_can_be_left_out(cuda: torchdevice.Scope) -> None:
    torch._C._cuda_record_memory_history(
        "all", "all", "python", 100, False, False, False, ["free_requested", "alloc"]
    )
    kept = _allocate(2)
    del kept
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    assert events and {e["action"] for e in events} - {"segment_alloc"} == {"free_completed"}


@pytest.mark.usefixtures("no_collections")
def test_views_and_arguments_are_no_allocations(recording: torchdevice.Scope) -> None:
    old = torch.ones(1000, device="cuda")
    torch.cuda.memory._record_memory_history(clear_history=True)
    views = [old[2:], old.view(10, 100), old.add_(1), old.t()]
    assert torch.cuda.memory._snapshot()["device_traces"][0] == [] and len(views) == 4


@pytest.mark.usefixtures("no_collections")
def test_results_of_higher_order_operators_are_recorded(recording: torchdevice.Scope) -> None:
    """They reach a dispatch mode whole, and torch refuses modes that do not declare them."""
    a = torch.ones(1000, device="cuda")
    branches = (lambda x: x + 1, lambda x: x - 1)
    results = [torch.ops.higher_order.cond(which, *branches, (a,)) for which in (True, False)]
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    allocated = {event["data_ptr"] for event in events if event["action"] == "alloc"}
    assert {result.data_ptr() for result in results} <= allocated
    assert [result[0].item() for result in results] == [2, 0]


@pytest.mark.usefixtures("no_collections")
def test_a_recording_ends_with_its_scope(chosen: str) -> None:
    with torchdevice.portable() as scope:
        torch.cuda.memory._record_memory_history()
        inner = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    torch.ones(3)
    with scope:
        assert not torch._C._cuda_isHistoryEnabled()
    assert len(inner) == (1 if chosen in ("cpu", "simulated:mps") else 0)


@pytest.mark.usefixtures("no_collections")
def test_a_recording_stopped_below_another_mode(chosen: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with torchdevice.portable():
        torch.cuda.memory._record_memory_history()
        with FlopCounterMode(display=False) as counter:
            torch.cuda.memory._record_memory_history(enabled=None)
            a = torch.ones(4, 4, device="cuda")
            a @ a
        assert counter.get_total_flops() == 128
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    # Dynamo compiles nothing as long as this is true.
    assert not torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


@pytest.mark.usefixtures("no_collections")
def test_running_out_is_observed_and_recorded() -> None:
    seen: list[tuple[int, ...]] = []
    with torchdevice.simulate(memory=4 * MIB):
        torch.cuda.memory._record_memory_history()
        torch._C._cuda_attach_out_of_memory_observer(lambda *figures: seen.append(figures))
        ooms = torch.cuda.memory_stats()["num_ooms"]
        with pytest.raises(torch.cuda.OutOfMemoryError, match=r"Tried to allocate 12\.00 MiB"):
            torch.empty(12 * MIB - 5, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_stats()["num_ooms"] == ooms + 1
        event = torch.cuda.memory._snapshot()["device_traces"][0][-1]
    assert [figures[:3] for figures in seen] == [(0, 12 * MIB, 4 * MIB)]
    assert (
        event["action"] == "oom" and event["size"] == 12 * MIB and event["device_free"] <= 4 * MIB
    )


class _Doubles(torch.autograd.Function):
    """Asks for much more memory in the backward pass, in which no function of torch is seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].repeat(64)


RUN_OUT: dict[str, Callable[[torch.Tensor], object]] = {
    "method": lambda x: x.repeat(64),
    "operator": lambda x: x.expand(64, -1) + 1,
    "function": lambda x: torch.cat([x] * 64),
    "cast": lambda x: x.expand(64, -1).double(),
    "in place": lambda x: torch.stack([x] * 64, out=torch.empty(0, device=x.device)),
    "backward": lambda x: _Doubles.apply(x.requires_grad_()).sum().backward(),
}
"""Ways to ask for more memory than there is, with operators that no function of ours wraps."""


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("compute", [None, "meta"])
@pytest.mark.parametrize("kind", RUN_OUT)
def test_running_out_is_observed_once_in_each_operator(kind: str, compute: Any) -> None:
    seen: list[tuple[int, ...]] = []
    with torchdevice.simulate(devices=2, memory=32 * MIB, compute=compute):
        x = torch.ones(MIB, device="cuda:1")
        torch._C._cuda_attach_out_of_memory_observer(lambda *figures: seen.append(figures))
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            RUN_OUT[kind](x)
    ((device, wanted, total, _),) = seen
    assert (device, total) == (1, 32 * MIB) and wanted >= 64 * 4 * MIB


@pytest.mark.usefixtures("no_collections")
def test_snapshots_of_several_devices() -> None:
    with torchdevice.simulate(count=2):
        torch.cuda.memory._record_memory_history()
        # More than the segments of what earlier tests left have room for.
        kept = [torch.ones(16 * MIB, device="cuda:1"), torch.ones(16 * MIB, device="cuda:0")]
        traces = torch.cuda.memory._snapshot()["device_traces"]
        assert [[event["action"] for event in trace] for trace in traces] == [
            ["segment_alloc", "alloc"]
        ] * 2
        assert len(kept) == 2
        assert {segment["device"] for segment in torch.cuda.memory_snapshot()} == {0, 1}
        assert torch.cuda.memory_snapshot((0, 7)) == []


@pytest.mark.usefixtures("no_collections")
def test_allocations_of_a_backward_pass_are_recorded(recording: torchdevice.Scope) -> None:
    weight = torch.ones(50, 50, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    assert weight.grad is not None
    assert any(e["action"] == "alloc" and e["data_ptr"] == weight.grad.data_ptr() for e in events)


@pytest.mark.usefixtures("no_collections")
def test_strict_scopes_refuse_what_is_approximate() -> None:
    with torchdevice.portable("cpu", strict=True), pytest.raises(FidelityError):
        torch.cuda.memory._record_memory_history()
    with torchdevice.simulate(strict=True):
        torch.cuda.memory._record_memory_history()
        assert torch.cuda.memory_snapshot() is not None


def test_pools_and_allocators_name_the_way_out(cuda: torchdevice.Scope, kind: str) -> None:
    from torchdevice.errors import NotSupportedError

    calls: list[Any] = [lambda: torch.cuda.change_current_allocator(_Allocator())]  # type: ignore[arg-type]
    if kind != "simulated":  # which has pools
        calls.append(torch.cuda.MemPool)
    for call in calls:
        with pytest.raises(NotSupportedError, match="tensors are allocated as usual"):
            call()


class _Allocator:
    def allocator(self) -> Any:
        return self


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "name", ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]
)
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda:2"])
def test_one_figure_is_read_without_the_table_of_all(target: str, name: str) -> None:
    key = f"{name.split('_')[-1]}_bytes.all.{'peak' if name.startswith('max') else 'current'}"
    read = getattr(torch.cuda, name)  # as a program that imports it before the scope
    frames = []
    with torchdevice.portable(target) as scope:
        held = torch.ones(1000, device="cuda")
        figures = {getattr(torch.cuda.memory, name)(), getattr(torch.cuda, name)(0)}
        if target == "cpu":  # the process may have less memory than when the base was taken
            assert min(figures) >= 0
        else:
            assert min(figures) > 0 and len(figures) == 1
        if target != "cpu":  # where other parts of the process allocate meanwhile
            assert getattr(torch.cuda, name)() == torch.cuda.memory_stats()[key] == read() > 0
            assert getattr(torch.cuda, name)("cuda:1") == torch.cuda.memory_stats(1)[key]
        with pytest.raises(RuntimeError, match=r"Invalid device argument -?7"):
            getattr(torch.cuda, name)(7 if target != "cpu" else -7)
        sys.setprofile(
            lambda frame, event, argument: frames.append(frame) if event == "call" else None
        )
        try:
            getattr(torch.cuda, name)()
        finally:
            sys.setprofile(None)
    assert len(frames) < 100 and held.numel() == 1000
    assert bool(scope.journal.degraded) is (target == "cpu")


@pytest.mark.usefixtures("no_collections")
def test_a_snapshot_is_the_allocators_layout() -> None:
    with torchdevice.simulate():
        before = torch.cuda.memory_reserved()
        kept = [
            torch.empty(size, dtype=torch.uint8, device="cuda") for size in (700, 3 * MIB, 40 * MIB)
        ]
        del kept[1]
        segments = torch.cuda.memory_snapshot()
        stats = torch.cuda.memory_stats()
        assert (
            sum(each["total_size"] for each in segments)
            == torch.cuda.memory_reserved()
            >= before + 40 * MIB
        )
        assert sum(each["allocated_size"] for each in segments) == torch.cuda.memory_allocated()
        for segment in segments:
            ends = [block["address"] + block["size"] for block in segment["blocks"]]
            assert [segment["address"], *ends] == [b["address"] for b in segment["blocks"]] + [
                ends[-1]
            ]
        places = {block["data_ptr"]: segment for segment in segments for block in segment["blocks"]}
        assert places[kept[0].data_ptr()]["segment_type"] == "small"
        assert places[kept[1].data_ptr()]["total_size"] == 40 * MIB
        assert stats["segment.all.current"] == len(segments)
        torch.cuda.empty_cache()
        assert (
            torch.cuda.memory_reserved() <= sum(each["total_size"] for each in segments) - 20 * MIB
        )


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("variable", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_change_the_allocator(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "expandable_segments:True,max_split_size_mb:40"
    if variable is not None:
        monkeypatch.setenv(variable, text)
    with torchdevice.simulate():
        if variable is None:
            with pytest.warns(FutureWarning, match="deprecated"):
                torch.cuda.memory._set_allocator_settings(text)
        kept = torch.empty(3 * MIB, device="cuda")
        found = torch.cuda.memory._snapshot()
        assert found["allocator_settings"]["expandable_segments"] and kept.numel() == 3 * MIB
        assert (
            found["allocator_settings"]["max_split_size"]
            == 40 * MIB
            == torch.cuda.memory_stats()["max_split_size"]
        )
        assert any(segment["is_expandable"] for segment in found["segments"])
    monkeypatch.undo()
    with torchdevice.simulate():
        other = torch.empty(3 * MIB, device="cuda")
        assert (
            not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
            and other.numel()
        )


def test_a_nested_scope_leaves_the_settings_of_the_outer_one() -> None:
    def found() -> tuple[int, bool]:
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        return settings["max_split_size"], settings["expandable_segments"]

    with torchdevice.simulate():
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:40")
        for options in ({}, {"count": 3, "memory": "1GiB"}):
            with torchdevice.simulate(**options):
                assert found() == (40 * MIB, False)
                torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
                assert found() == (-1, True)
            assert found() == (40 * MIB, False)
    with torchdevice.simulate():
        assert found() == (-1, False)


@pytest.mark.usefixtures("no_collections")
def test_a_nested_scope_leaves_the_cached_segments_of_the_outer_one() -> None:
    with torchdevice.simulate() as outer:
        x = torch.empty(7 * MIB, device="cuda")
        address = torch.cuda.memory_snapshot()[-1]["address"]
        del x
        reserved, frees = torch.cuda.memory_reserved(), torch.cuda.memory_stats()["num_device_free"]
        for options in ({}, {"compute": "meta"}, {"memory": "1GiB"}):
            with torchdevice.simulate(**options), outer:
                assert torch.cuda.memory_reserved() == reserved >= 28 * MIB
            assert torch.cuda.memory_reserved() == reserved
        assert torch.cuda.memory_stats()["num_device_free"] == frees
        y = torch.empty(7 * MIB, device="cuda")
        assert torch.cuda.memory_snapshot()[-1]["address"] == address and y.shape == (7 * MIB,)
        del y
    with torchdevice.simulate():
        assert torch.cuda.memory_reserved() < reserved


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense:1", "Unrecognized key 'nonsense' in CUDA allocator config."),
        (
            "max_split_size_mb:10",
            "CachingAllocator option max_split_size_mb too small, must be >= 20",
        ),
        (
            "garbage_collection_threshold:1.5",
            "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
        ),
        ("roundup_power2_divisions:3", "For roundups, the divisions has to be power of 2"),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(text: str, message: str) -> None:
    with torchdevice.simulate():
        torch.cuda.init()
        before = torch.cuda.memory._snapshot()["allocator_settings"]
        with pytest.raises(ValueError, match=re.escape(message)):
            torch._C._accelerator_setAllocatorSettings(text)
        assert torch.cuda.memory._snapshot()["allocator_settings"] == before


@pytest.mark.usefixtures("no_collections")
@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 has no large_segment_size_mb")
def test_a_setting_is_forgotten_with_its_text() -> None:
    with torchdevice.simulate():
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:32")
        # Refused below the size of a large segment.
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:21")
        assert torch.cuda.memory._snapshot()["allocator_settings"]["max_split_size"] == 21 * MIB


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: torch.cuda.Event().record() or torch.cuda.current_stream().query(),
    ],
)
def test_record_stream_defers_the_reuse_of_memory(wait: Any) -> None:
    with torchdevice.simulate():
        x = torch.ones(5 * MIB, device="cuda")
        torch.cuda.synchronize()
        for used in (False, True):
            y = torch.empty(7 * MIB, device="cuda")
            if used:
                y.record_stream(torch.cuda.Stream())
            first = torch.cuda.memory_stats()["active_bytes.all.current"]
            del y
            assert torch.cuda.memory_stats()["active_bytes.all.current"] == first - (
                0 if used else 28 * MIB
            )
        wait(x)
        assert torch.cuda.memory_stats()["active_bytes.all.current"] == first - 28 * MIB


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("copy", ["to", "copy_"])
def test_only_a_copy_that_makes_the_host_wait_frees_pending_memory(copy: str, pinned: bool) -> None:
    with torchdevice.simulate():
        x = torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        y = torch.empty(7 * MIB, device="cuda")
        y.record_stream(torch.cuda.Stream())
        first = torch.cuda.memory_stats()["active_bytes.all.current"]
        del y
        if copy == "to":
            assert x.to("cpu", non_blocking=pinned).is_pinned() is pinned
        else:
            # To pageable memory the copy is blocking.
            torch.empty(4, pin_memory=pinned).copy_(x, non_blocking=True)
        assert torch.cuda.memory_stats()["active_bytes.all.current"] == first - (
            0 if pinned else 28 * MIB
        )


def test_a_copy_to_the_host_without_waiting_is_pinned() -> None:
    with torchdevice.simulate():
        x = torch.arange(6.0, device="cuda").view(2, 3).t()
        for host in (x.to("cpu", non_blocking=True), x.to("cpu", torch.float64, non_blocking=True)):
            assert (
                host.is_pinned() and host[1:].is_pinned() and torch.equal(host.to(x.dtype), x.cpu())
            )
        for other in (x.cpu(), x.to("cpu"), torch.ones(2).to("cpu", non_blocking=True)):
            assert not other.is_pinned()
    with torchdevice.simulate("mps", written_for="mps"):
        assert not torch.ones(2, device="mps").to("cpu", non_blocking=True).is_pinned()


def _block(tensor: torch.Tensor) -> int:
    """Return the bytes of the block of a tensor's memory."""
    return -(-tensor.untyped_storage().nbytes() // 512) * 512


@pytest.mark.usefixtures("no_collections")
def test_the_peak_of_a_training_step_is_the_sum_of_its_tensors() -> None:
    """By hand: tensors kept by autograd; AdamW's weights, gradients, states and temporary."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=320,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = _block(tensor)
        return tensor

    with torchdevice.simulate():
        start = torch.cuda.memory_allocated()
        model = transformers.GPT2LMHeadModel(config).cuda()
        weights = {
            each.untyped_storage().data_ptr(): _block(each)
            for each in (*model.parameters(), *model.buffers())
        }
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.arange(4 * 32, device="cuda").view(4, 32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = model(input_ids=tokens, labels=tokens, use_cache=False)
        held = {
            each.untyped_storage().data_ptr(): _block(each)
            for each in (tokens, found.loss, found.logits)
        }
        by_hand = sum({**weights, **kept, **held}.values())
        assert torch.cuda.memory_allocated() - start == pytest.approx(by_hand, rel=0.02)
        found.loss.backward()
        del found
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        by_hand = (
            sum(weights.values())
            + 4 * sum(_block(each) for each in model.parameters())
            + _block(tokens)
        )
        assert torch.cuda.max_memory_allocated() - start == pytest.approx(by_hand, rel=0.02)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("memory", [None, "5GiB"])
@pytest.mark.parametrize("name", ["empty", "zeros"])
def test_more_than_any_machine_has_is_refused_in_cudas_words(name: str, memory: str | None) -> None:
    with torchdevice.simulate(memory=memory):
        total = torch.cuda.get_device_properties(0).total_memory
        for gibibytes, message in (
            (
                800_000_000,
                "Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of "
                f"{total / 2**30:.2f} GiB",
            ),
            (8_000_000_000, "Tried to allocate more than 1EB memory."),
        ):
            before = torch.cuda.memory_stats()["num_ooms"]
            with pytest.raises(
                torch.cuda.OutOfMemoryError, match=re.escape(f"CUDA out of memory. {message}")
            ):
                getattr(torch, name)(gibibytes << 30, dtype=torch.int8, device="cuda")
            assert torch.cuda.memory_stats()["num_ooms"] > before


@pytest.mark.usefixtures("no_collections")
def test_the_settings_limit_the_memory_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5")
    with torchdevice.simulate(memory="100MiB", count=2):
        torch.cuda.init()
        assert [torch.cuda.get_per_process_memory_fraction(index) for index in range(2)] == [
            0.5,
            0.5,
        ]
        kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda:1")
        with pytest.raises(torch.cuda.OutOfMemoryError, match=re.escape("50.00 MiB allowed")):
            torch.empty(20 * MIB, dtype=torch.uint8, device="cuda:1")
        assert kept.numel() == 40 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:1.5")
    with (
        torchdevice.simulate(),
        pytest.raises(ValueError, match=re.escape("is invalid, set it in [0.0, 1.0]")),
    ):
        torch.cuda.init()
