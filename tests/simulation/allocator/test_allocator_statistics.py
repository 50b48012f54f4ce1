"""`torch.cuda.memory_stats` against a count of the blocks that `memory_snapshot` shows."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

import torchdevice

pytestmark = pytest.mark.one_engine

NAMES = [
    "allocation",
    "allocated_bytes",
    "active",
    "active_bytes",
    "requested_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "segment",
    "reserved_bytes",
]
POOLS = ["all", "small_pool", "large_pool"]


def counted() -> Counter[str]:
    """Return the current statistics, from the snapshot alone."""
    found: Counter[str] = Counter()
    for segment in torch.cuda.memory_snapshot():
        values = Counter(segment=1, reserved_bytes=segment["total_size"])
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                values.update(allocation=1, allocated_bytes=block["size"])
                values.update(active=1, active_bytes=block["size"])
                values.update(requested_bytes=block["requested_size"])
            elif len(segment["blocks"]) > 1:
                values.update(inactive_split=1, inactive_split_bytes=block["size"])
        for name, value in values.items():
            found[f"{name}.all"] += value
            found[f"{name}.{segment['segment_type']}_pool"] += value
    return found


@pytest.mark.parametrize("is_expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_current_peaks_and_sums_of_changes(seed: int, is_expandable: bool) -> None:
    draw = random.Random(seed)
    sizes = [1, 500, 513, 70_000, 1 << 20, (1 << 20) + 1, 3 << 20, 11 << 20, 30 << 20]
    with torchdevice.simulate():
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")
        held: list[torch.Tensor] = []
        before = counted()
        peaks, ups, downs = Counter(before), Counter(before), Counter[str]()
        for step in range(120):
            if held and draw.random() < 0.45:
                held.pop(draw.randrange(len(held)))
            else:
                size = draw.choice(sizes)
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            if step == 60:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.reset_accumulated_memory_stats()
                peaks, ups, downs = counted(), Counter(), Counter()
                before = counted()
                continue
            stats, now = torch.cuda.memory_stats(), counted()
            if step < 60 and not is_expandable:
                assert stats["num_device_alloc"] == now["segment.all"]
            # CUDA counts neither expandable segments nor their free parts.
            left_out = ("segment", "inactive") if is_expandable else ()
            names = [name for name in NAMES if not name.startswith(left_out)]
            for key in (f"{name}.{pool}" for name in names for pool in POOLS):
                peaks[key] = max(peaks[key], now[key])
                ups[key] += max(now[key] - before[key], 0)
                downs[key] += max(before[key] - now[key], 0)
                shown = [
                    stats[f"{key}.{what}"] for what in ("current", "peak", "allocated", "freed")
                ]
                assert shown == [now[key], peaks[key], ups[key], downs[key]], (step, key)
            before = now


def test_blocks_above_the_limit_of_splits_are_counted() -> None:
    with torchdevice.simulate():
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
        small = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        counts = [torch.cuda.memory_stats()]
        large = torch.empty(21 << 20, dtype=torch.uint8, device="cuda")
        counts.append(torch.cuda.memory_stats())
        del large
        counts.append(torch.cuda.memory_stats())
        torch.cuda.empty_cache()
        counts.append(torch.cuda.memory_stats())
        assert small.numel() == 1 << 20
    assert [each["oversize_allocations.current"] for each in counts] == [0, 1, 0, 0]
    assert [each["oversize_segments.current"] for each in counts] == [0, 1, 1, 0]
    assert [each["oversize_segments.freed"] for each in counts] == [0, 0, 0, 1]


@pytest.mark.parametrize(("first", "second"), [(500, 1), (1, 500), (7, 7), (500, 513)])
def test_a_block_that_is_used_again_counts_what_was_requested_last(first: int, second: int) -> None:
    """A dropped block serves the next request at once, where nothing has read the statistics."""
    with torchdevice.simulate():
        dropped = torch.empty(first, dtype=torch.uint8, device="cuda")
        del dropped
        kept = torch.empty(second, dtype=torch.uint8, device="cuda")
        stats = torch.cuda.memory_stats()
        assert stats["requested_bytes.all.current"] == kept.nbytes
        assert stats["requested_bytes.all.allocated"] == first + second
        assert stats["requested_bytes.all.peak"] == max(first, second)
        assert stats["allocation.all.allocated"] == 2 and stats["allocation.all.peak"] == 1


def test_a_new_device_has_counted_nothing() -> None:
    with torchdevice.simulate():
        stats = torch.cuda.memory_stats()
        assert {key: value for key, value in stats.items() if value and "." in key} == {}
        torch.empty(3, device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        peaks = {key: value for key, value in torch.cuda.memory_stats().items() if "peak" in key}
        assert peaks and not any(peaks.values())
