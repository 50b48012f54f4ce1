"""The model of CUDA's caching allocator, against a slow reference of the documented rules."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import sweeping
import torch
from processes import run_python

import torchdevice
from torchdevice.kernel.devices.device_memory import Block as AllocatedBlock
from torchdevice.kernel.devices.device_memory import Segment, Stat
from torchdevice.kernel.python.byte_sizes import written
from torchdevice.simulation import machine, policy
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.allocator_settings import DEFAULT, Settings, parsed
from torchdevice.simulation.allocator.allocator_stats import Figures, Statistics
from torchdevice.simulation.allocator.caching_allocator import Device
from torchdevice.simulation.allocator.memory_blocks import NOBODY, USED, Block, Pool
from torchdevice.simulation.allocator.rounding import rounded, segment_size

pytestmark = pytest.mark.one_engine

KIB, MIB = 1 << 10, 1 << 20

ADDRESSES = 1 << 45
"""How many addresses a device has. Which it has depends on the devices whose memory is in use."""


class Figure:
    """A value that remembers its peak, the sum of its increases and the sum of its decreases."""

    def __init__(self) -> None:
        self.value = self.peak = self.up = self.down = 0

    def set(self, value: int) -> None:
        self.up, self.down = (
            self.up + max(value - self.value, 0),
            self.down + max(self.value - value, 0),
        )
        self.value, self.peak = value, max(self.peak, value)


class Piece:
    """A block of the reference: free where it has no request."""

    def __init__(self, size: int, requested: int | None = None):
        self.size = size
        self.requested = requested
        self.waits = False
        self.uses: set[int] = set()

    @property
    def is_free(self) -> bool:
        return self.requested is None


class Chunk:
    """A segment of the reference."""

    def __init__(self, address: int, size: int, small: bool, stream: int):
        self.address, self.size, self.small, self.stream = address, size, small, stream
        self.pieces = [Piece(size)]

    def where(self) -> Iterator[tuple[int, Piece]]:
        at = self.address
        for piece in self.pieces:
            yield at, piece
            at += piece.size


BYTES = (
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "reserved_bytes",
    "inactive_split_bytes",
)

KEYS = (*BYTES, "allocation", "active", "segment", "inactive_split")

POOLS = ("all", "small_pool", "large_pool")


class Reference:
    """The documented rules: linear search over all blocks, all figures recounted each step."""

    def __init__(self, settings: Settings, limit: int | None) -> None:
        self.settings, self.limit = settings, limit
        self.chunks: list[Chunk] = []
        self.waiting: list[Piece] = []
        self.end = 0
        self.retries = self.failures = 0
        self.figures = {(key, pool): Figure() for key in KEYS for pool in POOLS}

    def rounded(self, size: int) -> int:
        interval = 0
        while interval < 15 and size >= 2 << 20 << interval:
            interval += 1
        parts = self.settings.divisions[interval]
        if parts > 1 and size > 512 * parts:
            power = 1
            while power * 2 <= size:
                power *= 2
            steps = [power + n * (power // parts) for n in range(parts + 1)]
            return next(step for step in steps if step >= size)
        return -(-size // 512) * 512

    def allocate(self, requested: int, stream: int) -> Piece | None:
        size = self.rounded(requested)
        small = size <= MIB
        fits = [
            (piece.size, address, chunk, piece)
            for chunk in self.chunks
            if chunk.small == small and chunk.stream == stream
            for address, piece in chunk.where()
            if piece.is_free and piece.size >= size
        ]
        most = self.settings.max_split_size
        chosen = min(fits, key=lambda fit: fit[:2]) if fits else None
        if (
            chosen is not None
            and most is not None
            and chosen[0] >= (most if size < most else size + 20 * MIB)
        ):
            chosen = None
        if chosen is None:
            made = self.new_chunk(size, small, stream)
            if made is None:
                self.count()
                return None
            chosen = (made.size, made.address, made, made.pieces[0])
        _, _, chunk, piece = chosen
        rest = piece.size - size
        if rest >= 512 if small else rest > MIB and (most is None or size < most):
            piece.size = size
            chunk.pieces.insert(chunk.pieces.index(piece) + 1, Piece(rest))
        piece.requested = requested
        self.count()
        return piece

    def new_chunk(self, size: int, small: bool, stream: int) -> Chunk | None:
        wanted = (
            2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        )
        enough = self.has(wanted) or (
            self.release_oversize(size, small, stream) and self.has(wanted)
        )
        if not enough:
            self.empty_cache()
            self.retries += 1
        if not self.has(wanted):
            self.failures += 1
            return None
        if not self.chunks:
            self.end = 0
        self.chunks.append(Chunk(self.end, wanted, small, stream))
        self.end += wanted
        return self.chunks[-1]

    def has(self, wanted: int) -> bool:
        return self.limit is None or sum(chunk.size for chunk in self.chunks) + wanted <= self.limit

    def release_oversize(self, size: int, small: bool, stream: int) -> bool:
        most = self.settings.max_split_size
        if most is None:
            return False
        cached = sorted(
            (chunk.size, chunk.address, chunk)
            for chunk in self.chunks
            if chunk.small == small
            and chunk.stream == stream
            and len(chunk.pieces) == 1
            and chunk.pieces[0].is_free
            if chunk.size >= most
        )
        needed = max(size, most)
        enough = [chunk for length, _, chunk in cached if length >= needed]
        for chunk in enough[:1] or [chunk for _, _, chunk in reversed(cached)]:
            if needed > 0:
                needed -= chunk.size
                self.chunks.remove(chunk)
        self.count()
        return needed <= 0

    def free(self, piece: Piece) -> None:
        if piece.uses:
            piece.waits = True
            self.waiting.append(piece)
        else:
            self.release(piece)
        self.count()

    def release(self, piece: Piece) -> None:
        chunk = next(chunk for chunk in self.chunks if piece in chunk.pieces)
        piece.requested = None
        merged: list[Piece] = []
        for each in chunk.pieces:
            if merged and merged[-1].is_free and each.is_free:
                merged[-1].size += each.size
            else:
                merged.append(each)
        chunk.pieces = merged

    def wait(self) -> None:
        while self.waiting:
            piece = self.waiting.pop(0)
            piece.waits, piece.uses = False, set()
            self.release(piece)
            self.count()

    def empty_cache(self) -> None:
        self.wait()
        self.chunks = [
            chunk
            for chunk in self.chunks
            if not (len(chunk.pieces) == 1 and chunk.pieces[0].is_free)
        ]
        self.count()

    def count(self) -> None:
        for pool, chunks in (
            ("small_pool", [chunk for chunk in self.chunks if chunk.small]),
            ("large_pool", [chunk for chunk in self.chunks if not chunk.small]),
        ):
            used = [piece for chunk in chunks for piece in chunk.pieces if not piece.is_free]
            held = [piece for piece in used if not piece.waits]
            idle = [
                piece
                for chunk in chunks
                if len(chunk.pieces) > 1
                for piece in chunk.pieces
                if piece.is_free
            ]
            values = {
                "allocated_bytes": sum(piece.size for piece in held),
                "active_bytes": sum(piece.size for piece in used),
                "requested_bytes": sum(piece.requested or 0 for piece in used),
                "reserved_bytes": sum(chunk.size for chunk in chunks),
                "inactive_split_bytes": sum(piece.size for piece in idle),
                "allocation": len(held),
                "active": len(used),
                "segment": len(chunks),
                "inactive_split": len(idle),
            }
            for key, value in values.items():
                self.figures[key, pool].set(value)
        for (key, pool), figure in self.figures.items():
            if pool == "all":
                parts = [self.figures[key, each] for each in POOLS[1:]]
                figure.value = sum(part.value for part in parts)
                figure.peak = max(figure.peak, figure.value)
                figure.up, figure.down = (
                    sum(part.up for part in parts),
                    sum(part.down for part in parts),
                )

    def layout(self) -> list[tuple[int, int, list[tuple[int, int, bool]]]]:
        return sorted(
            (
                chunk.address,
                chunk.stream,
                [(address, piece.size, piece.is_free) for address, piece in chunk.where()],
            )
            for chunk in self.chunks
        )


def layout(segments: list[Segment]) -> list[tuple[int, int, list[tuple[int, int, bool]]]]:
    return [
        (
            each.parts[0].address % ADDRESSES,
            each.stream,
            [(p.address % ADDRESSES, p.size, p.state == "inactive") for p in each.parts],
        )
        for each in segments
    ]


def figures(device: Device) -> dict[tuple[str, str], tuple[int, ...]]:
    found = device.statistics()
    return {(key, pool): tuple(found[key][pool]) for key in KEYS for pool in POOLS}


def is_sound(device: Device) -> bool:
    """Whether segments tile, blocks are disjoint, neighbours merged, and sums agree."""
    segments, statistics = device.segments({}), device.statistics()
    parts = [part for segment in segments for part in segment.parts]
    ends = [part.address + part.size for part in parts]
    tiles = all(
        earlier.address + earlier.size == later.address
        for segment in segments
        for earlier, later in zip(segment.parts, segment.parts[1:], strict=False)
    )
    merged = all(
        not earlier.state == later.state == "inactive"
        for segment in segments
        for earlier, later in zip(segment.parts, segment.parts[1:], strict=False)
    )
    apart = all(end <= later.address for end, later in zip(ends, parts[1:], strict=False))
    used = sum(part.size for part in parts if part.state == "active_allocated")
    reserved = sum(part.size for part in parts)
    return (
        tiles
        and merged
        and apart
        and used == statistics["allocated_bytes"]["all"].current
        and reserved == statistics["reserved_bytes"]["all"].current
    )


SIZES = (
    1,
    511,
    512,
    513,
    4 * KIB,
    300 * KIB,
    MIB - 511,
    MIB,
    MIB + 1,
    3 * MIB,
    9 * MIB,
    10 * MIB,
    13 * MIB,
    45 * MIB,
)

SETTINGS = (
    "",
    "max_split_size_mb:20",
    "roundup_power2_divisions:[1:4,2:2,>:8]",
    "max_split_size_mb:32",
)


@pytest.mark.parametrize("limit", [None, 100 * MIB])
@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_random_programs(seed: int, text: str, limit: int | None) -> None:
    choose, settings = random.Random(f"{seed} {text} {limit}"), parsed(text)
    device = Device(0, lambda index: (limit, None))
    reference = Reference(settings, limit)
    device.configure(settings)
    held: list[tuple[Block, Piece]] = []
    for step in range(250):
        what = choose.random()
        if what < 0.5:
            size, stream = choose.choice(SIZES), choose.choice([0, 0, 0, 7])
            piece = reference.allocate(size, stream)
            if piece is None:
                with pytest.raises(torch.OutOfMemoryError):
                    device.allocate(size, stream)
            else:
                held.append((device.allocate(size, stream), piece))
                if choose.random() < 0.1:
                    device.use(held[-1][0], (0, 9))
                    piece.uses.add(9)
        elif what < 0.9 and held:
            block, piece = held.pop(choose.randrange(len(held)) if choose.random() < 0.5 else -1)
            device.freed.append(block)  # as the end of a storage does
            reference.free(piece)
        elif what < 0.93:
            device.empty_cache()
            reference.empty_cache()
        elif what < 0.96:
            device.host_waited()
            reference.wait()
        elif step % 3 == 0:  # seldom, so that freed blocks wait
            assert layout(device.segments({})) == reference.layout()
    assert layout(device.segments({})) == reference.layout() and is_sound(device)
    wanted = {key: (f.value, f.peak, f.up, f.down) for key, f in reference.figures.items()}
    assert figures(device) == wanted
    numbers = device.statistics()
    assert (numbers["num_ooms"], numbers["num_alloc_retries"]) == (
        reference.failures,
        reference.retries,
    )
    device.freed.extend(block for block, _ in held)
    device.empty_cache()
    assert (
        device.segments({}) == [] and device.figures().reserved == device.figures().allocated == 0
    )


@pytest.mark.parametrize(
    "sizes",
    [(1, 512, 513, 2 * KIB), (MIB + 1, 3 * MIB, 9 * MIB), SIZES],
    ids=["small", "large", "all"],
)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_are_freed_and_requested_again(seed: int, sizes: tuple[int, ...]) -> None:
    """A request like the block freed last gets, without a search, the block a search finds."""
    choose, device = random.Random(seed), Device(0)
    reference = Reference(DEFAULT, None)
    held: list[tuple[int, Block, Piece]] = []

    def allocate(size: int) -> None:
        held.append((size, device.allocate(size), reference.allocate(size, 0)))

    for _ in range(150):
        if len(held) < 4 or choose.random() < 0.3:
            allocate(choose.choice(sizes))
        size, block, piece = held.pop(choose.randrange(len(held)))
        device.freed.append(block)
        reference.free(piece)
        if choose.random() < 0.6:
            allocate(size)
    assert layout(device.segments({})) == reference.layout() and is_sound(device)
    assert figures(device) == {
        key: (f.value, f.peak, f.up, f.down) for key, f in reference.figures.items()
    }


@pytest.mark.parametrize("limit", [None, 200 * MIB])
@pytest.mark.parametrize("seed", range(4))
def test_expandable_segments(seed: int, limit: int | None) -> None:
    choose = random.Random(f"{seed} {limit}")
    device = Device(0, lambda index: (limit, None))
    device.configure(parsed("expandable_segments:True"))
    held: list[Block] = []
    for _ in range(200):
        what = choose.random()
        if what < 0.55:
            try:
                held.append(device.allocate(choose.choice(SIZES), choose.choice([0, 0, 7])))
            except torch.OutOfMemoryError:
                assert limit is not None
        elif what < 0.9 and held:
            device.freed.append(held.pop(choose.randrange(len(held))))
        elif what < 0.93:
            device.empty_cache()
        assert is_sound(device)
    segments = device.segments({})
    assert all(each.is_expandable for each in segments)
    unit = {False: 2 * MIB, True: 20 * MIB}
    assert all(
        sum(part.size for part in each.parts) % unit[each.is_large] == 0 for each in segments
    )
    assert limit is None or device.figures().peak_reserved <= limit
    device.freed.extend(held)
    device.empty_cache()
    assert (
        device.segments({}) == []
        and device._blocks.segments.heads == {}
        and device.figures().reserved == 0
    )


def test_an_expandable_segment_grows_where_others_are_fragmented() -> None:
    """Slowly growing requests: usual segments cannot serve them, expandable ones grow."""
    reserved = {}
    for text in ("", "expandable_segments:True"):
        device = Device(0)
        device.configure(parsed(text))
        for mib in range(12, 60, 4):
            device.freed.append(device.allocate(mib * MIB))
        reserved[text] = device.figures().reserved
    assert reserved[""] == sum(range(12, 60, 4)) * MIB
    # Units of 20 MiB for the largest, 56 MiB.
    assert reserved["expandable_segments:True"] == 60 * MIB


def test_a_used_block_waits_for_the_host() -> None:
    device = Device(0)
    block = device.allocate(700)
    device.use(block, (0, 0))  # its own stream
    assert block.uses is None
    device.use(block, (0, 3))
    device.freed.append(block)
    other = device.allocate(700)
    assert other.address != block.address and device.statistics()["active"]["all"].current == 2
    assert device.segments({})[0].parts[0].state == "active_pending_free"
    device.host_waited()
    assert (
        device.allocate(700).address == block.address
        and device.statistics()["active"]["all"].current == 2
    )


def test_private_pools() -> None:
    device = Device(0, lambda index: (8 * MIB, None))
    device.keep_private((0, 1))
    device.route((0, 1), lambda: True)
    inside = device.allocate(700)
    device.unroute((0, 1))
    outside = device.allocate(700)
    assert [each.segment_pool_id for each in device.segments({})] == [
        (0, 1),
        (0, 0),
    ] and inside.pool is not outside.pool
    device.freed.append(inside)
    device.empty_cache()
    assert len(device.segments({})) == 2  # in use, so that its segments stay
    device.release_private((0, 1))
    assert device.uses_of((0, 1)) == 0


@pytest.mark.parametrize(
    ("text", "size", "block"),
    [
        ("", 1, 512),
        ("", 512, 512),
        ("", 513, 1024),
        ("roundup_power2_divisions:4", 1200, 1536),
        ("roundup_power2_divisions:4", 5 * MIB + 1, 6 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 300 * MIB, 300 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 513 * MIB, 768 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 1025 * MIB, 1152 * MIB),
    ],
)
def test_sizes_are_rounded(text: str, size: int, block: int) -> None:
    assert rounded(size, parsed(text)) == block


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
    ],
)
def test_sizes_of_segments(size: int, segment: int) -> None:
    assert segment_size(size, DEFAULT) == segment
    larger = DEFAULT._replace(large_segment_size=32 * MIB)
    assert segment_size(size, larger) == (32 * MIB if segment == 20 * MIB else segment)


def test_the_size_of_large_segments_can_be_set_where_torch_has_the_setting() -> None:
    try:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")
    except ValueError:  # torch 2.10
        with pytest.raises(ValueError, match="Unrecognized key 'large_segment_size_mb'"):
            parsed("large_segment_size_mb:32")
    else:
        assert parsed("large_segment_size_mb:32").large_segment_size == 32 * MIB


def test_a_device_is_counted_once() -> None:
    assert storages.device(7) is storages.device(7) and storages.device(7) is not storages.device(6)


def addresses(index: int) -> set[int]:
    return set(storages.blocks(storages.device(index)).values())


@pytest.mark.usefixtures("no_collections")
def test_the_first_tensor_of_a_device() -> None:
    with torchdevice.simulate("cuda", count=12):
        tensor = torch.ones(3, device="cuda:11")
        assert torch.cuda.memory_allocated(11) == 512 and tensor.tolist() == [1, 1, 1]


def test_a_device_without_an_index_is_the_first_one() -> None:
    with torchdevice.simulate("cuda", count=2):
        assert torch.empty(2, device=policy.DEVICE_TYPE).get_device() == 0


def test_a_block_is_listed_until_its_last_tensor_ends() -> None:
    with torchdevice.simulate("cuda", count=2):
        tensor = torch.ones(3, device="cuda:1")
        view, address = tensor[1:], tensor.data_ptr()
        del tensor
        assert address in addresses(1) and address not in addresses(0)
        del view
        assert address not in addresses(1)


@pytest.mark.usefixtures("no_collections")
def test_a_storage_that_was_emptied_and_filled_again_is_one_block() -> None:
    with torchdevice.simulate("cuda"):
        tensor = torch.ones(3, device="cuda")
        before = addresses(0)
        allocated = torch.cuda.memory_allocated()
        owners = len(storages.blocks(storages.device(0)))
        tensor.untyped_storage().resize_(0)
        assert addresses(0) < before and torch.cuda.memory_allocated() == allocated - 512
        assert tensor.untyped_storage().data_ptr() == 0
        tensor.untyped_storage().resize_(12)
        assert len(addresses(0)) == len(before) and torch.cuda.memory_allocated() == allocated
        # A storage that C++ made has a reference here from its first resize on.
        assert len(storages.blocks(storages.device(0))) == owners or storages.native is not None
        del tensor
        assert (
            len(addresses(0)) == len(before) - 1
            and torch.cuda.memory_allocated() == allocated - 512
        )


@pytest.mark.usefixtures("no_collections")
def test_the_memory_of_the_cpu_is_freed_with_the_last_storage_that_has_it() -> None:
    with torchdevice.simulate("cuda"):
        tensor = torch.ones(3, device="cuda")
        memory, address = weakref.ref(storages.memory_of(tensor)), tensor.data_ptr()
        other = storages.twin(tensor)
        del other
        assert address in addresses(0) and memory() is not None
        other = storages.twin(tensor)
        del tensor
        assert address not in addresses(0) and (other[1:] + 1).tolist() == [2, 2]
        del other
        assert address not in addresses(0) and memory() is None


@pytest.mark.parametrize("of", [storages.twin, storages.copy_of])
def test_tensors_of_other_kinds_have_no_twin(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torchdevice.simulate("cuda", count=2):
        x = torch.eye(3, device="cuda")
        for tensor in (x.cpu(), x.to_sparse()):
            other = of(tensor)
            assert (
                other.device == tensor.device
                and other.layout is tensor.layout
                and other.dtype is tensor.dtype
            )
            assert torch.equal(tensor.to_dense(), other.to_dense())
        there = x.to("cuda:1")
        assert of(there).device == there.device and torch.equal(of(there), there)
    with torchdevice.simulate("cuda", compute="meta"):
        x = torch.ones(3, device="cuda")
        assert of(x).data_ptr() == x.data_ptr()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.filterwarnings("ignore")
def test_a_result_in_the_memory_of_an_argument_has_its_storage() -> None:
    """torch's CPU kernel of it returns a result inside a larger storage, and an argument."""
    with torchdevice.simulate("cuda"):
        rows = torch.eye(4).flip(0).cuda().to_sparse_csr()
        columns, allocated = rows.col_indices(), torch.cuda.memory_allocated()
        coordinates = rows.to_sparse()
        assert (
            coordinates._values().untyped_storage()._cdata == rows.values().untyped_storage()._cdata
        )
        assert torch.cuda.memory_allocated() - allocated == 512  # the indices
        for tensor in (columns, storages.twin(columns)):
            assert (tensor[1:] + 0).tolist() == [2, 1, 0] and (
                tensor.view(torch.int32)[2:4] + 0
            ).tolist() == [2, 0]


def test_a_conjugate_result_keeps_its_bit() -> None:
    with torchdevice.simulate("cuda"):
        x = torch.tensor([1 + 2j, 3j], device="cuda").conj()
        product = x @ x
        assert product.is_conj() and product.item() == (x.cpu() @ x.cpu()).item()


def test_storages_of_inference_can_be_written_to_outside_of_it() -> None:
    """torch refuses this of tensors, but not of others with their storage."""
    with torchdevice.simulate("cuda"):
        with torch.inference_mode():
            inferred = torch.ones(4, device="cuda")
        other = torch.empty(0, device="cuda").set_(inferred.untyped_storage(), 0, (2, 2), (2, 1))
        # Writes to its argument itself, without torch's dispatcher between.
        torch._foreach_add_([other[1:]], 1)
        assert not other.is_inference() and inferred.tolist() == [1, 1, 2, 2]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_result_that_its_memory_is_too_small_for() -> None:
    with torchdevice.simulate("cuda"):
        x, out = torch.arange(1000.0, device="cuda"), torch.ones(2, device="cuda")
        allocated = torch.cuda.memory_allocated()
        torch.add(x, 1, out=out)
        assert (
            torch.equal(out.cpu(), torch.arange(1.0, 1001))
            and torch.cuda.memory_allocated() - allocated == 4096 - 512
        )


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_views_of_a_result_that_grows_see_its_values_as_on_the_cpu() -> None:
    with torchdevice.simulate():
        found = []
        for device in ("cuda", "cpu"):
            whole = torch.zeros(8, device=device)
            out, view = whole[3:5], whole[2:4]
            torch.add(torch.arange(6.0, device=device), 5, out=out)
            found.append(
                (
                    whole.tolist(),
                    out.tolist(),
                    view.tolist(),
                    out.storage_offset(),
                    whole.untyped_storage().nbytes(),
                )
            )
        assert found[0] == found[1] and found[0][1] == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3,), (2,)),
        ((3, 2), (4, 1)),
        ((3, 2), (2, 3)),
        ((2, 3), (1, 3)),
        ((3, 2), (1, 3)),
        ((2, 3), (3, 1)),
    ],
)
def test_overlaps_are_judged_as_on_the_cpu(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """torch finds overlaps of tensors with gaps by identity alone, of others by ranges."""

    def refusals(device: str) -> list[str]:
        memory, found = torch.zeros(12, dtype=torch.int32, device=device), []
        one, other = (memory.as_strided(shape, strides) for _ in range(2))
        for source in (other, one):
            try:
                one.scatter_(0, torch.zeros(shape, dtype=torch.long, device=device), source)
                found.append("")
            except RuntimeError as error:
                found.append(str(error))
        return found

    with torchdevice.simulate("cuda"):
        assert refusals("cuda") == refusals("cpu")


WRITTEN: dict[str, Callable[..., Any]] = {
    "index_add_": lambda x, y, i: x.index_add_(1, i, y),
    "index_copy_": lambda x, y, i: x.index_copy_(1, i, y),
    "scatter_add_": lambda x, y, i: x.scatter_add_(1, i.expand(x.shape), y),
    "add_": lambda x, y, i: x.add_(y),
    "copy_": lambda x, y, i: x.copy_(y),
    "addmm_": lambda x, y, i: x.addmm_(torch.ones(3, 3, device=x.device), y),
    "out": lambda x, y, i: torch.cumsum(y, 1, out=x),
}


@pytest.mark.parametrize("native", ["never", "auto"])
@pytest.mark.parametrize("strides", [(8, 2), (8, 1), (2, 6), (4, 1), (1, 3)])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_result_with_gaps_and_its_view_are_two_tensors(
    name: str, strides: tuple[int, int], native: str
) -> None:
    """Their CPU tensors must differ: torch lets one with gaps overlap only itself."""

    def written(device: str) -> list[Any]:
        found: list[Any] = []
        for detached in (True, False):
            x = torch.empty_strided((3, 4), strides, device=device)
            x.copy_(torch.arange(12.0, device=device).reshape(3, 4))
            try:
                WRITTEN[name](
                    x.detach() if detached else x, x, torch.arange(4, device=device).flip(0)
                )
            except RuntimeError as error:
                found.append(str(error))
            found.append(x.tolist())
        return found

    with torchdevice.simulate("cuda", native=native):
        assert written("cuda") == written("cpu")


GEOMETRIES: list[tuple[Any, ...]] = [
    (0, (5000,), (4,)), (5, (0,), (4,)), (5, (), ()), (500, (2, 3)), (0, (2,), (-1,)), (-1, (2,), (1,)),
    (0, (-2,), (1,)), (0, (500,), (0,)), (3, (7,), (1,)), (4, (7,), (1,)),
]  # fmt: skip


@pytest.mark.parametrize("native", ["never", "auto"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_set_lets_a_storage_grow_as_on_the_cpu(geometry: tuple[Any, ...], native: str) -> None:
    def found(device: str) -> Any:
        a = torch.arange(10.0, device=device)
        view = a[2:]
        try:
            a.set_(a.untyped_storage(), *geometry)
        except RuntimeError as error:
            return str(error)
        return a.shape, a.stride(), a.storage_offset(), a.untyped_storage().nbytes(), view.tolist()

    with torchdevice.simulate("cuda", native=native):
        assert found("cuda") == found("cpu")
        # The device counts the memory by which it grew.
        x = torch.empty(1, device="cuda")
        before = torch.cuda.memory_allocated()
        x.set_(x.untyped_storage(), 0, (1 << 20,), (1,))
        assert torch.cuda.memory_allocated() - before == (4 << 20) - 512


CUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x[1:],
    lambda x: x[:2],
    lambda x: x[:2].view(2, 1),
    lambda x: x[1:3],
    lambda x: x[:4].view(2, 2),
    lambda x: x[:4].view(2, 2).t(),
]


def test_a_kernel_sees_dtype_shape_strides_and_beginning_of_its_argument() -> None:
    kinds = (torch.float32, torch.int32)
    with torchdevice.simulate("cuda"):
        x, host = torch.arange(12.0, device="cuda"), torch.arange(12.0)
        views = [*itertools.product(CUTS, kinds), *((cut, kind) for kind in kinds for cut in CUTS)]
        for cut, kind in views:
            seen, wanted = cut(x.view(kind)), cut(host.view(kind))
            assert torch.equal((seen + 0).cpu(), wanted) and torch.equal((seen + 0).cpu(), wanted)
        square = torch.arange(4.0).view(2, 2)
        assert torch.equal((square.cuda().t() + 0).cpu(), square.t())


def test_memory_belongs_to_the_current_stream_and_outside_of_scopes_to_the_default_one() -> None:
    with torchdevice.simulate("cuda"):
        side = torch.cuda.Stream()
        tensors = [torch.ones(3, device="cuda")]
        with torch.cuda.stream(side):
            tensors.append(torch.ones(3, device="cuda"))
    tensors.append(tensors[0] + 1)
    owners = [storages.owner_of(each.untyped_storage()) for each in tensors]
    assert [owner and owner.block and owner.block.pool.stream for owner in owners] == [
        0,
        side.stream_id,
        0,
    ]


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def allocated(self, block: AllocatedBlock) -> None:
        self.said.append(("allocated", block.address))

    def freed(self, address: int) -> None:
        self.said.append(("freed", address))

    def segment_changed(self, action: str, segment: AllocatedBlock, stream: int) -> None:
        self.said.append((action, segment.size))


def test_an_observer_is_told_of_every_block_that_has_memory() -> None:
    told = Told()
    with torchdevice.simulate("cuda"):
        ended = torch.ones(3, device="cuda")
        del ended
        here = machine.current()
        forget = storages.observe(told, here)
        try:
            tensor, nothing = torch.ones(3, device="cuda"), torch.ones(0, device="cuda")
            address, other = tensor.data_ptr(), Told()
            nothing = torch.ones(3, device="cuda")
            emptied = nothing.data_ptr()
            nothing.untyped_storage().resize_(0)
            storages.observe(other, here)()
            del tensor, nothing
        finally:
            forget()
        assert other.said == []
        torch.ones(3, device="cuda")
    said = [each for each in told.said if each[0] in ("allocated", "freed")]
    of_each = [[(what, each) for what in ("allocated", "freed")] for each in (address, emptied)]
    assert said == [of_each[0][0], *of_each[1], of_each[0][1]]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("options", [{}, {"compute": "meta"}], ids=["values", "no values"])
@pytest.mark.parametrize("function", ["on_device", "without_values", None])
def test_an_interrupt_comes_while_a_tensor_is_made(
    options: dict[str, Any], function: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the tensor has its block, or by an observer when it has it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    told = Told()
    with torchdevice.simulate("cuda", **options):
        kept = torch.ones(3, device="cuda")
        before = torch.cuda.memory_allocated()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            if function is None:
                patch.setattr(told, "allocated", interrupted)
                patch.setattr(storages.device(0), "observers", [told])
            else:
                patch.setattr(storages, function, interrupted)
            try:
                torch.empty(5, device="cuda")
            except KeyboardInterrupt as error:  # which keeps the tensor
                more = [torch.ones(5, device="cuda") for _ in range(2)] if function is None else []
                in_use = [block.size for block in storages.blocks(storages.device(0))]
                assert torch.cuda.memory_allocated() == sum(in_use)
                assert len(set(addresses(0))) == len(in_use) and error.__traceback__ is not None
                del more
        assert torch.cuda.memory_allocated() == before and kept.data_ptr() in addresses(0)


@pytest.mark.usefixtures("no_collections")
def test_memory_that_ran_out_is_counted() -> None:
    device = storages.Device(0)
    assert device.statistics()["num_ooms"] == 0
    with torchdevice.simulate("cuda", memory="1MiB"):
        before = torch.cuda.memory_stats()["num_ooms"]
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.ones(1 << 20, device="cuda")
        assert torch.cuda.memory_stats()["num_ooms"] == before + 1


OF_THE_ALLOCATOR = (
    "block_allocation.py",
    "caching_allocator.py",
    "segments.py",
    "memory_blocks.py",
    "memory_figures.py",
    "torch_modules/cuda/memory.py",
    "memory_statistics.py",
)


RECOVERING = ("_recover", "lay_out_anew", "clear", "count_anew")


class TestStatistics:
    """Statistics of figures and of a device, by themselves."""

    def test_new_figures_are_zero(self) -> None:
        shown = Statistics().shown()
        of_pools = [
            stat for pools in shown.values() if isinstance(pools, dict) for stat in pools.values()
        ]
        assert len(of_pools) == 27 and set(of_pools) == {Stat(0, 0, 0, 0)}

    def test_a_peak_of_pending_blocks_lasts_until_it_is_forgotten(self) -> None:
        whole = Figures()
        part = Figures(whole)
        part.add(512, 1)
        part.suspend(512)
        part.add(1024, 1)
        part.suspend(-512, -1)
        part.remove(512, 1)
        for figures in (part, whole):
            assert figures.active("allocated", "pending", "peak_active") == Stat(
                1024, 1536, 1536, 512
            )
            assert figures.active("count", "pending_count", "peak_active_count") == Stat(1, 2, 2, 1)
            figures.forget_peaks()
            assert figures.active("allocated", "pending", "peak_active") == Stat(
                1024, 1024, 1536, 512
            )
            assert figures.active("count", "pending_count", "peak_active_count") == Stat(1, 1, 2, 1)
        part.remove(1024, 1)
        for figures in (part, whole):
            figures.forget_peaks()
            assert figures.active("count", "pending_count", "peak_active_count") == Stat(0, 0, 2, 2)

    def test_what_was_counted_before_it_was_forgotten_is_in_no_sum(self) -> None:
        figures = Figures()
        for _ in range(3):
            figures.add(512, 100)
        figures.remove(512, 100)
        figures.suspend(512)
        figures.forget_totals()
        assert figures.stat("allocated") == Stat(512, 1536, 0, 0)
        assert figures.active("allocated", "pending", "peak_active") == Stat(1024, 1536, 0, 0)
        figures.suspend(-512, -1)
        figures.remove(512, 100)
        figures.add(2048, 7)
        assert figures.stat("requested") == Stat(107, 300, 7, 100)
        assert figures.active("allocated", "pending", "peak_active") == Stat(2560, 2560, 2048, 512)

    def test_parts_that_grow_and_vanish_raise_the_peaks(self) -> None:
        whole = Figures()
        parts = [Figures(whole), Figures(whole)]
        parts[0].split(1, 512)
        parts[0].split(0, 1)
        parts[0].split(-1, -513)
        assert parts[0].stat("inactive") == whole.stat("inactive") == Stat(0, 513, 513, 513)
        assert parts[0].stat("inactive_count") == whole.stat("inactive_count") == Stat(0, 1, 1, 1)
        assert parts[1].stat("inactive") == Stat(0, 0, 0, 0)

    def test_blocks_are_counted_anew(self) -> None:
        figures = Figures()
        figures.add(512, 100)
        figures.suspend(512)
        figures.split(1, 512)
        pool = Pool(0, True, NOBODY, False, figures)
        blocks = [Block(0, 1024, pool, USED), Block(1024, 2048, pool, USED)]
        blocks[0].requested, blocks[1].requested = 1000, 2000
        figures.count_anew(blocks)
        counted = {
            "allocated": 3072,
            "requested": 3000,
            "count": 2,
            "reserved": 3072,
            "segments": 2,
        }
        assert {
            name: (figures.stat(name).current, figures.stat(name).peak) for name in counted
        } == {name: (value, value) for name, value in counted.items()}
        assert [
            getattr(figures, name)
            for name in ("pending", "pending_count", "inactive", "inactive_count")
        ] == [0] * 4

    def test_a_reset_forgets_peaks_or_sums(self) -> None:
        device = Device(0)
        assert device.statistics()["max_split_size"] == -1
        device.configure(parsed("max_split_size_mb:40"))
        blocks = [device.allocate(size) for size in (40 * MIB, 44 * MIB, 1 * MIB)]
        device.freed.extend(blocks[:2])
        device.empty_cache()
        found = device.statistics()
        assert found["max_split_size"] == 40 * MIB
        assert found["oversize_segments"] == found["oversize_allocations"] == Stat(0, 2, 2, 2)
        numbers = (
            "num_sync_all_streams",
            "num_device_alloc",
            "num_device_free",
            "num_alloc_retries",
            "num_ooms",
        )
        assert [found[name] for name in numbers] == [1, 3, 2, 0, 0]
        device.reset_peak()
        device.reset_accumulated()
        found = device.statistics()
        assert found["oversize_segments"] == found["oversize_allocations"] == Stat(0, 0, 0, 0)
        assert found["allocated_bytes"]["all"] == Stat(MIB, MIB, 0, 0)
        assert found["reserved_bytes"]["all"] == Stat(2 * MIB, 2 * MIB, 0, 0)
        assert [found[name] for name in numbers] == [0] * 5

    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (1023, "1023 bytes"),
            (1 << 10, "1024 bytes"),
            ((1 << 20) - (1 << 10), "1023.00 KiB"),
            (1 << 20, "1024.00 KiB"),
            (1 << 30, "1024.00 MiB"),
            (3 << 29, "1.50 GiB"),
            (1 << 42, "4096.00 GiB"),
        ],
    )
    def test_sizes_are_written_as_cudas_allocator_writes_them(self, size: int, text: str) -> None:
        assert written(size) == text


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:40"])
@pytest.mark.parametrize("at", range(1, 6))
def test_an_interrupt_comes_while_somebody_is_told_of_a_segment(text: str, at: int) -> None:
    """It comes from an observer, so that recovering lines are counted as run."""

    class Interrupt(BaseException):
        pass

    held: list[Any] = []
    told: list[str] = []

    class Telling(Told):
        def segment_changed(self, action: str, segment: AllocatedBlock, stream: int) -> None:
            told.append(action)
            if len(told) == at:
                device.freed.extend(held[:1])  # a storage ends just then
                del held[:1]
                raise Interrupt

    observers = [Telling()]
    device = Device(0, observers=observers)
    device.configure(parsed(text))
    device.live = lambda device: list(held)
    for size in (1, 3 * MIB, 30 * MIB, 50 * MIB):
        with contextlib.suppress(Interrupt):
            held.append(device.allocate(size))
    device.freed.append(held.pop())
    with contextlib.suppress(Interrupt):
        device.empty_cache()
    device.host_waited()
    assert_consistent(device, held)
    assert len(told) >= at or "expandable" in text, "each size has a segment of its own"
    observers.clear()
    held.append(device.allocate(50 * MIB))
    assert_consistent(device, held)


def test_a_child_that_is_forked_in_the_middle_of_a_change_begins_anew() -> None:
    device = Device(0)
    held = [device.allocate(MIB), device.allocate(3 * MIB)]
    device.live = lambda device: held
    changing, forked = threading.Event(), threading.Event()

    def change() -> None:
        with device._lock:
            device._blocks.free(held[0])  # and the statistics of its pool are not written yet
            changing.set()
            forked.wait(30)

    thread = threading.Thread(target=change)
    thread.start()
    changing.wait(30)
    device.begin_in_child()
    assert_consistent(device, held)
    forked.set()
    thread.join()
    device.begin_in_child()
    assert_consistent(device, held)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks on Windows")
def test_a_child_forked_while_a_thread_allocates_can_allocate() -> None:
    with torchdevice.simulate("cuda"):
        device, locked, forked = storages.device(0), threading.Event(), threading.Event()

        def hold() -> None:
            with device._lock:
                locked.set()
                forked.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        locked.wait(30)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the child
            signal.alarm(20)
            os._exit(0 if torch.ones(3, device="cuda").tolist() == [1, 1, 1] else 1)
        _, status = os.waitpid(child, 0)
        forked.set()
        thread.join()
        assert status == 0


class Interrupting:
    """Lets an interrupt come at the line of the allocator with this number; counts the lines."""

    def __init__(self, number: int) -> None:
        self.number, self.lines = number, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if (
            not frame.f_code.co_filename.endswith(OF_THE_ALLOCATOR)
            or frame.f_code.co_name in RECOVERING
        ):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                raise KeyboardInterrupt
        return self

    def during(self, step: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return step()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)


def assert_consistent(device: Device, held: list[Block]) -> None:
    parts = [part for segment in device.segments({}) for part in segment.parts]
    in_use = {part.address: part.size for part in parts if part.state == "active_allocated"}
    assert in_use == {block.address: block.size for block in held}
    figures, stats = device.figures(), device.statistics()
    assert figures.allocated == sum(in_use.values()) and figures.reserved == sum(
        part.size for part in parts
    )
    assert stats["allocation"]["all"].current == len(held)
    assert stats["requested_bytes"]["all"].current == sum(block.requested for block in held)
    ends = [part.address + part.size for part in parts]
    assert all(end <= part.address for end, part in zip(ends, parts[1:], strict=False))


def history_with_an_interrupt(text: str, number: int) -> int:
    """Return allocator lines of a random history with an interrupt at one of them."""
    choose, device, held = random.Random(3), Device(0, lambda index: (200 * MIB, None)), []
    device.configure(parsed(text))
    device.live = lambda device: list(held)
    interrupting = Interrupting(number)
    for step in range(60):
        if choose.random() < 0.6 or not held:
            size = choose.choice((1, 700, MIB, 3 * MIB, 12 * MIB, 30 * MIB))
            stream = choose.choice((0, 0, 1))
            try:
                block = interrupting.during(
                    lambda size=size, stream=stream: device.allocate(size, stream)
                )
            except torch.OutOfMemoryError:
                interrupting.during(device.empty_cache)
                continue
            if block is not None:
                held.append(block)
        else:
            block = held.pop(choose.randrange(len(held)))
            if step % 3 == 0:
                device.use(block, (0, 2))
            device.freed.append(block)
        if step % 5 == 0:
            interrupting.during(device.host_waited)
        if number:
            device.host_waited()
            assert_consistent(device, held)
    return interrupting.lines


@pytest.mark.interrupts
@pytest.mark.parametrize("text", ["", "expandable_segments:True", "max_split_size_mb:40"])
def test_an_interrupt_leaves_what_tensors_have(text: str, sweep: tuple[bool, int]) -> None:
    lines = history_with_an_interrupt(text, 0)
    assert lines > 500
    for number in sweeping.choose(range(1, lines), sweep, 60):
        history_with_an_interrupt(text, number)


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_backend_may_be_chosen_after_torch_was_imported(target: str, variable: str) -> None:
    """In a process of its own: torch's parser reads the environment once."""
    program = f"""
        import os, torch, torchdevice
        os.environ[{variable!r}] = "max_split_size_mb:64,backend:cudaMallocAsync"
        with torchdevice.portable({target!r}):
            assert torch.ones(2, device="cuda").sum() == 2
            torch.cuda.memory._set_allocator_settings("max_split_size_mb:40")
        os.system("echo $" + {variable!r})
    """
    done = run_python("-c", textwrap.dedent(program), **{variable: ""})
    assert (
        done.returncode == 0 and done.stdout == "max_split_size_mb:64,backend:cudaMallocAsync\n"
    ), done.stderr
