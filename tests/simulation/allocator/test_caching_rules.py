"""CUDA's caching rules at their limits, and statistics after an interrupt."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchdevice.kernel.devices.device_memory import Block as AllocatedBlock
from torchdevice.kernel.devices.device_memory import Stat
from torchdevice.simulation.allocator.allocator_settings import DEFAULT, parsed
from torchdevice.simulation.allocator.caching_allocator import Device
from torchdevice.simulation.allocator.memory_blocks import NOBODY, Block

pytestmark = pytest.mark.one_engine

MIB = 1 << 20

PER_DEVICE = 1 << 45
"""The addresses of a device."""

OWNER = (0, 1)


def device(
    text: str = "", total: int | None = None, allowed: int | None = None, index: int = 0
) -> Device:
    made = Device(index, lambda index: (total, allowed))
    made.configure(parsed(text))
    return made


def cached(device: Device, *sizes: int) -> list[Block]:
    """Allocate blocks of so many MiB and free them all."""
    blocks = [device.allocate(size * MIB) for size in sizes]
    device.freed.extend(blocks)
    device.figures()
    return blocks


def segments(device: Device) -> list[float]:
    return [sum(part.size for part in each.parts) / MIB for each in device.segments({})]


def inside(device: Device, sizes: list[int]) -> list[Block]:
    """Allocate blocks in the private pool."""
    device.route(OWNER, lambda: True)
    try:
        return [device.allocate(size) for size in sizes]
    finally:
        device.unroute(OWNER)


class TestAddresses:
    def test_each_device_has_its_own(self) -> None:
        devices = [device(index=index) for index in range(3)]
        first = [each.allocate(700).address for each in devices]
        assert len({address // PER_DEVICE for address in first}) == 3

    def test_they_begin_anew_once_nothing_is_reserved(self) -> None:
        one = device(index=2)
        (block,) = cached(one, 30)
        one.empty_cache()
        assert one.allocate(30 * MIB).address == block.address

    def test_what_nobody_has_requested_has_no_values(self) -> None:
        one = device()
        block = one.allocate(700)
        parts = one.segments({block: 5})[0].parts
        assert [(part.data_ptr, part.requested_size) for part in parts] == [(5, 700), (0, 0)]


class TestOversize:
    """``max_split_size_mb``: larger blocks stay whole, and go before the whole cache does."""

    def test_a_request_of_the_limit_gets_a_block_that_is_not_split(self) -> None:
        one = device("max_split_size_mb:20")
        (block,) = cached(one, 24)
        assert one.allocate(20 * MIB) is block and block.size == 24 * MIB and segments(one) == [24]

    @pytest.mark.parametrize(("size", "reused"), [(10, False), (20, True), (19, False)])
    def test_which_requests_get_a_block_of_the_limit(self, size: int, reused: bool) -> None:
        one = device("max_split_size_mb:20")
        (block,) = cached(one, 20)
        assert (one.allocate(size * MIB) is block) is reused

    @pytest.mark.parametrize(("size", "reused"), [(26, True), (24, False), (22, False)])
    def test_how_much_larger_than_the_request_a_block_may_be(self, size: int, reused: bool) -> None:
        one = device("max_split_size_mb:20,max_non_split_rounding_mb:20")
        (block,) = cached(one, 44)
        assert (one.allocate(size * MIB) is block) is reused

    @pytest.mark.parametrize(
        ("free", "request_", "total", "left"),
        [
            ([34, 36, 38], 45, 110, [34, 46]),  # no more than is needed, the largest first
            ([24, 20, 20], 44, 64, [20, 44]),  # exactly enough
            ([20, 20], 40, 50, [40]),  # of the limit itself
            ([18, 22, 24], 46, 64, [18, 46]),  # those below the limit stay
            ([24, 30, 40], 18, 94, [30, 40, 18]),  # the smallest that is large enough alone
        ],
    )
    def test_what_is_released(
        self, free: list[int], request_: int, total: int, left: list[int]
    ) -> None:
        one = device("max_split_size_mb:20", total * MIB)
        cached(one, *free)
        held = one.allocate(request_ * MIB)
        assert segments(one) == left and held.size <= left[-1] * MIB
        assert one.statistics()["num_alloc_retries"] == 0

    def test_parts_of_segments_in_use_are_not_released(self) -> None:
        one = device(total=64 * MIB)
        cached(one, 64)
        one.allocate(2 * MIB)  # of a segment of 64 MiB, of which the rest is split off
        one.configure(parsed("max_split_size_mb:20"))
        with pytest.raises(torch.OutOfMemoryError):
            one.allocate(63 * MIB)
        assert segments(one) == [64]


class TestExpandable:
    TEXT = "expandable_segments:True"

    @pytest.mark.parametrize(("usual", "grown"), [(30, 40), (40, 22)])
    def test_the_smaller_of_both_kinds_of_blocks_is_taken(self, usual: int, grown: int) -> None:
        one = device()
        (block,) = cached(one, usual)
        one.configure(parsed(self.TEXT))
        # Larger than the other block, so the segment of another kind.
        held = one.allocate((usual + 2) * MIB)
        other = one.allocate(grown * MIB)
        one.freed.append(other)
        one.figures()
        found = one.allocate(21 * MIB)
        assert found is (block if usual < grown else other) and held.pool.expands

    def test_a_free_part_is_used_again_while_they_are_enabled(self) -> None:
        one = device(self.TEXT)
        blocks = [one.allocate(4 * MIB) for _ in range(3)]
        one.freed.append(blocks[1])
        assert one.allocate(4 * MIB).address == blocks[1].address
        one.freed.append(blocks[2])
        one.configure(parsed("max_split_size_mb:200"))
        assert not one.allocate(4 * MIB).pool.expands

    def test_free_parts_are_not_counted_as_inactive(self) -> None:
        one = device(self.TEXT)
        blocks = [one.allocate(4 * MIB) for _ in range(3)]
        one.freed.append(blocks[1])
        found = one.statistics()
        assert (
            found["inactive_split"]["all"]
            == found["inactive_split_bytes"]["all"]
            == Stat(0, 0, 0, 0)
        )
        assert found["reserved_bytes"]["all"].current == 20 * MIB

    @pytest.mark.parametrize("size", [29 * MIB, 29 * MIB + 512, 30 * MIB - 512])
    def test_a_rest_that_only_they_leave_is_no_longer_split_off_without_them(
        self, size: int
    ) -> None:
        one = device()
        (block,) = cached(one, 30)
        one.configure(parsed(self.TEXT))
        assert one.allocate(size) is block and len(one.segments({})[0].parts) == 2
        one.configure(DEFAULT)
        one.freed.append(block)
        assert one.allocate(size) is block and block.size == 30 * MIB


class TestPrivatePools:
    def test_a_block_that_was_freed_in_one_is_not_given_outside(self) -> None:
        one = device()
        one.keep_private(OWNER)
        (block,) = inside(one, [700])
        one.freed.append(block)
        assert one.allocate(700).pool.owner == NOBODY

    def test_one_splits_and_serves_only_its_own_unless_it_says_so(self) -> None:
        one = device(total=2 * MIB)
        one.keep_private(OWNER)
        blocks = inside(one, [700, 700])
        assert blocks[1].address == blocks[0].address + 1024
        one.freed.extend(blocks)
        with pytest.raises(torch.OutOfMemoryError):
            one.allocate(700)

    def test_uses(self) -> None:
        one = device()
        assert one.uses_of(OWNER) == 0
        one.release_private(OWNER)
        one.keep_private(OWNER)
        one.keep_private(OWNER)
        assert one.uses_of(OWNER) == 2

    def test_emptying_one_leaves_the_others(self) -> None:
        one = device()
        one.keep_private(OWNER)
        one.freed.extend(inside(one, [700]))
        cached(one, 30)
        one.empty_private(OWNER)
        assert segments(one) == [2, 30]  # in use
        one.release_private(OWNER)
        one.empty_private(OWNER)
        assert segments(one) == [30]


NUMBERS = re.compile(
    r"Tried to allocate (.*)\. GPU 3 has a total capacity of (.*) of which (.*) is free\. .* this "
    r"process has (.*) memory in use\. (?:(.*) allowed; )?Of the allocated memory (.*) is "
    r"allocated by PyTorch, (?:"
    r"with (.*) allocated in private pools .*, )?and (.*) is reserved by PyTorch but unallocated\."
)


class TestOutOfMemory:
    @pytest.mark.parametrize(
        ("total", "allowed", "words"),
        [
            (32, None, ("32.00 MiB", "0 bytes", None)),
            (40, 33, ("40.00 MiB", "8.00 MiB", "33.00 MiB")),
            (None, 33, ("0 bytes", "0 bytes", "33.00 MiB")),
        ],
    )
    def test_the_numbers_of_the_text(
        self, total: int | None, allowed: int | None, words: tuple[Any, ...]
    ) -> None:
        limits = tuple(each and each * MIB for each in (total, allowed))
        one = device(total=limits[0], allowed=limits[1], index=3)
        one.keep_private(OWNER)
        one.allocate(12 * MIB)
        inside(one, [4 * MIB])
        with pytest.raises(torch.OutOfMemoryError) as caught:
            one.allocate(50 * MIB)
        found = NUMBERS.search(str(caught.value))
        assert found is not None
        capacity, free, allows = words
        in_private = "16.00 MiB"  # the rest of a segment of 20 MiB, of which 4 are in use
        assert found.groups() == (
            "50.00 MiB",
            capacity,
            free,
            "32.00 MiB",
            allows,
            "32.00 MiB",
            in_private,
            "0 bytes",
        )

    @pytest.mark.parametrize(
        ("total", "allowed", "told"),
        [(None, 8, (0, 8)), (8, None, (8, 8)), (8, 4, (8, 4)), (4, 8, (4, 8))],
    )
    def test_what_an_error_of_ones_own_is_told(
        self, total: int | None, allowed: int | None, told: Any
    ) -> None:
        seen: list[tuple[int, ...]] = []

        def error(*numbers: int) -> Exception:
            seen.append(numbers)
            return MemoryError("own")

        one = Device(0, lambda index: (total and total * MIB, allowed and allowed * MIB), error)
        one.allocate(700)
        with pytest.raises(MemoryError, match="own"):
            one.allocate(10 * MIB)
        assert seen == [(10 * MIB, 1024, *(each * MIB for each in told))]

    def test_all_that_is_allowed_may_be_had(self) -> None:
        one = device(total=100 * MIB, allowed=12 * MIB)
        assert one.allocate(12 * MIB).size == 12 * MIB

    def test_what_this_machine_cannot_serve(self) -> None:
        one = device(index=3)
        assert "more than 1EB" in one.refusal(1 << 60, 1 << 61)
        found = NUMBERS.search(one.refusal((1 << 60) - 1, 1 << 40))
        assert found is not None and found.groups()[:3] == (
            "1073741824.00 GiB",
            "1024.00 GiB",
            "1024.00 GiB",
        )
        assert one.statistics()["num_ooms"] == 2


class Telling:
    """An observer that calls a function with each change of a segment."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def segment_changed(self, action: str, segment: AllocatedBlock, stream: int) -> None:
        self._tell(action, segment.address, segment.size, stream)

    def allocated(self, block: AllocatedBlock) -> None: ...

    def freed(self, address: int) -> None: ...


def stopping(action: str) -> Callable[..., None]:
    """Return an observer of segments that is interrupted at the first change of a kind."""
    seen: list[str] = []

    def tell(changed: str, address: int, size: int, stream: int) -> None:
        seen.append(changed)
        if changed == action and seen.count(action) == 1:
            raise KeyboardInterrupt

    return tell


class TestInterrupts:
    """An interrupt at any line. Tensors keep their blocks, each as a segment of its own."""

    @pytest.mark.parametrize("step", ["allocate", "empty_cache"])
    def test_what_is_left(self, step: str) -> None:
        one = device("max_split_size_mb:20")
        one.keep_private(OWNER)
        small, large, oversize = one.allocate(700), one.allocate(3 * MIB), one.allocate(20 * MIB)
        (private,) = inside(one, [700])
        cached(one, 30)
        one.live = lambda device: [small, large, oversize, private]
        one.observers.append(
            Telling(stopping("segment_alloc" if step == "allocate" else "segment_free"))
        )
        with pytest.raises(KeyboardInterrupt):
            one.allocate(40 * MIB) if step == "allocate" else one.empty_cache()
        assert [block.requested for block in (small, large)] == [700, 3 * MIB]
        found = one.statistics()
        sizes = {"all": 23 * MIB + 2048, "small_pool": 2048, "large_pool": 23 * MIB}
        for key in ("allocated_bytes", "active_bytes", "reserved_bytes"):
            assert {pool: found[key][pool].current for pool in sizes} == sizes
        for key in ("allocation", "active", "segment"):
            assert [found[key][pool].current for pool in sizes] == [4, 2, 2]
        for key in ("oversize_allocations", "oversize_segments"):
            assert found[key].current == 1
        assert sorted(segments(one)) == [1024 / MIB, 1024 / MIB, 3, 20]
        one.freed.extend((small, large, oversize, private))
        one.release_private(OWNER)
        one.empty_cache()
        found = one.statistics()
        assert segments(one) == [] and found["reserved_bytes"]["all"].current == 0
        assert found["oversize_allocations"].current == found["oversize_segments"].current == 0

    def test_storages_may_end_before_it_and_meanwhile(self) -> None:
        one = device()
        before, meanwhile = one.allocate(700), one.allocate(3 * MIB)
        one.live = lambda device: [meanwhile]

        def tell(*change: Any) -> None:
            one.freed.extend((before, meanwhile))
            raise KeyboardInterrupt

        one.observers.append(Telling(tell))
        with pytest.raises(KeyboardInterrupt):
            one.allocate(30 * MIB)
        found = one.statistics()
        for key in ("allocated_bytes", "active_bytes", "requested_bytes", "allocation", "active"):
            assert found[key]["all"].current == 0
        assert segments(one) == [3]
