"""The accounting of a simulated device's memory, against a reference that looks at all blocks after every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.simulation import allocator

pytestmark = pytest.mark.one_engine

BLOCK, SEGMENT, LARGE = 512, 2 << 20, 1 << 20
"""Of CUDA's caching allocator, in bytes: the unit of blocks, that of segments, and the largest small block."""

KEYS = {
    "allocated_bytes": ("allocated", 1),
    "active_bytes": ("allocated", 1),
    "requested_bytes": ("requested", 1),
    "reserved_bytes": ("reserved", 1),
    "allocation": ("count", 1),
    "active": ("count", 1),
    "segment": ("reserved", SEGMENT),
}


def up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


class Figure:
    """A value that remembers its peak, the sum of its increases and the sum of its decreases."""

    def __init__(self) -> None:
        self.value = self.peak = self.up = self.down = 0

    def change(self, by: int) -> None:
        self.value += by
        self.peak = max(self.peak, self.value)
        self.up, self.down = self.up + max(by, 0), self.down - min(by, 0)


class Reference:
    """The statistics of the pools and of both together, with every freed block subtracted at once."""

    def __init__(self) -> None:
        self.figures = {
            (pool, name): Figure()
            for pool in ("all", "small_pool", "large_pool")
            for name in ("allocated", "requested", "count", "reserved")
        }

    def change(self, pool: str, name: str, by: int) -> None:
        for each in (pool, "all"):
            self.figures[each, name].change(by)

    def block(self, requested: int, sign: int) -> None:
        pool = "small_pool" if up(requested, BLOCK) <= LARGE else "large_pool"
        self.change(pool, "allocated", sign * up(requested, BLOCK))
        self.change(pool, "requested", sign * requested)
        self.change(pool, "count", sign)
        missing = self.figures[pool, "allocated"].value - self.figures[pool, "reserved"].value
        if missing > 0:
            self.change(pool, "reserved", up(missing, SEGMENT))

    def empty_cache(self) -> None:
        for pool in ("small_pool", "large_pool"):
            needed = up(self.figures[pool, "allocated"].value, SEGMENT)
            self.change(pool, "reserved", needed - self.figures[pool, "reserved"].value)

    def reset_peak(self) -> None:
        for figure in self.figures.values():
            figure.peak = figure.value

    def reset_accumulated(self) -> None:
        for figure in self.figures.values():
            figure.up = figure.down = 0

    def statistics(self) -> dict[str, Any]:
        return {
            key: {
                pool: tuple(n // unit for n in (f.value, f.peak, f.up, f.down))
                for pool in ("all", "small_pool", "large_pool")
                for f in [self.figures[pool, name]]
            }
            for key, (name, unit) in KEYS.items()
        }


def statistics(device: allocator.Device) -> dict[str, Any]:
    found = device.statistics()
    return {key: {pool: (s.current, s.peak, s.allocated, s.freed) for pool, s in found[key].items()} for key in KEYS}


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int) -> None:
    choose, device, reference = random.Random(seed), allocator.Device(0), Reference()
    held: list[int] = []
    sizes = (1, 511, 512, 513, 4096, LARGE - 511, LARGE, LARGE + 1, SEGMENT, SEGMENT + 1, 7 * SEGMENT - 3)
    for _ in range(300):
        step = choose.random()
        if step < 0.5:
            held.append(choose.choice(sizes))
            device.allocate(held[-1])
            reference.block(held[-1], 1)
        elif step < 0.85 and held:
            freed = held.pop(choose.randrange(len(held)))
            device.freed.append(freed)  # as the end of a storage does
            reference.block(freed, -1)
        elif step < 0.95:  # seldom, so that freed blocks wait
            assert statistics(device) == reference.statistics()
        else:
            name = choose.choice(["empty_cache", "reset_peak", "reset_accumulated"])
            getattr(device, name)()
            getattr(reference, name)()
    assert statistics(device) == reference.statistics()
    whole = {name: reference.figures["all", name] for name in ("allocated", "reserved")}
    figures = device.figures()
    assert (figures.allocated, figures.reserved) == (whole["allocated"].value, whole["reserved"].value)
    assert (figures.peak_allocated, figures.peak_reserved) == (whole["allocated"].peak, whole["reserved"].peak)
    segments = device.statistics()
    assert segments["num_device_alloc"] == whole["reserved"].up // SEGMENT
    assert segments["num_device_free"] == whole["reserved"].down // SEGMENT and segments["num_ooms"] == 0


@pytest.mark.parametrize(("size", "block"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)])
def test_sizes_are_rounded_as_by_cudas_allocator(size: int, block: int) -> None:
    assert allocator.rounded(size) == block


def addresses(index: int) -> set[int]:
    return {block.address for block in allocator.blocks(index)}


def test_a_block_is_listed_until_its_last_tensor_ends() -> None:
    with torchdevice.simulate("cuda", count=2):
        tensor = torch.ones(3, device="cuda:1")
        view, address = tensor[1:], tensor.data_ptr()
        del tensor
        assert address in addresses(1) and address not in addresses(0)
        del view
        assert address not in addresses(1)


def test_a_storage_that_was_emptied_and_filled_again_is_one_block() -> None:
    with torchdevice.simulate("cuda"):
        tensor = torch.ones(3, device="cuda")
        before, allocated = addresses(0), torch.cuda.memory_allocated()
        tensor.untyped_storage().resize_(0)
        assert addresses(0) < before and torch.cuda.memory_allocated() == allocated - BLOCK
        tensor.untyped_storage().resize_(12)
        assert len(addresses(0)) == len(before) and torch.cuda.memory_allocated() == allocated
        del tensor
        assert len(addresses(0)) == len(before) - 1 and torch.cuda.memory_allocated() == allocated - BLOCK


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def allocated(self, block: Any) -> None:
        self.said.append(("allocated", block.address))

    def freed(self, address: int) -> None:
        self.said.append(("freed", address))


def test_an_observer_is_told_of_every_block_that_has_memory() -> None:
    told = Told()
    with torchdevice.simulate("cuda"):
        allocator.observers.append(told)
        try:
            tensor, nothing = torch.ones(3, device="cuda"), torch.ones(0, device="cuda")
            address = tensor.data_ptr()
            del tensor, nothing
        finally:
            allocator.forget(told)
        torch.ones(3, device="cuda")
    assert told.said == [("allocated", address), ("freed", address)]


def test_memory_that_ran_out_is_counted() -> None:
    device = allocator.Device(0)
    assert device.statistics()["num_ooms"] == 0
    with torchdevice.simulate("cuda", memory="1MiB"):
        before = torch.cuda.memory_stats()["num_ooms"]
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.ones(1 << 20, device="cuda")
        assert torch.cuda.memory_stats()["num_ooms"] == before + 1


def test_a_device_is_counted_once() -> None:
    assert allocator.device(7) is allocator.device(7) and allocator.device(7) is not allocator.device(6)
