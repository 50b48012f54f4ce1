"""Memory pools of the program's own and of CUDA graphs, on simulated devices."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import NotSupportedError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate("cuda", count=2) as entered:
        gc.collect()
        torch.cuda.empty_cache()
        yield entered


def mebibyte() -> torch.Tensor:
    return torch.zeros(MIB, dtype=torch.uint8, device="cuda")


def segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    return torch.cuda.memory_snapshot(pool)


def states(pool: tuple[int, int]) -> list[str]:
    return [block["state"] for segment in segments(pool) for block in segment["blocks"]]


@pytest.mark.usefixtures("no_collections")
def test_a_pool_serves_allocations_where_it_is_used() -> None:
    pool = torch.cuda.MemPool()
    assert isinstance(pool, torch.cuda.MemPool) and pool.id[0] == 0 and pool.allocator is None
    # A whole segment, so that the next one outside needs another.
    outside = [mebibyte() for _ in range(2)]
    before = torch.cuda.memory_reserved()
    with torch.cuda.use_mem_pool(pool):
        assert pool.use_count() == 2
        kept = [mebibyte() for _ in range(3)]
        assert len(pool.snapshot()) == 2 and {
            each["segment_pool_id"] for each in pool.snapshot()
        } == {pool.id}
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            pass
    assert pool.use_count() == 1
    reserved = torch.cuda.memory_reserved()
    outside.append(mebibyte())
    assert (
        len(pool.snapshot()) == 2 and before + 4 * MIB == reserved <= torch.cuda.memory_reserved()
    )
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() >= before + 4 * MIB  # the pool keeps what it has
    del pool
    gc.collect()
    assert torch.cuda.memory_reserved() < before + 4 * MIB
    del outside


def test_a_pool_ends_before_its_tensors() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = mebibyte().fill_(3)
    name = pool.id
    del pool
    gc.collect()
    assert len(segments(name)) == 1 and bool((kept == 3).all())
    del kept
    torch.cuda.empty_cache()
    assert not segments(name)


def test_a_pool_is_one_of_a_device_and_a_thread() -> None:
    pool = torch.cuda.MemPool()
    others: list[torch.Tensor] = []
    with torch.cuda.use_mem_pool(pool):
        others.append(torch.zeros(8, device="cuda:1"))
        thread = threading.Thread(target=lambda: others.append(mebibyte()))
        thread.start()
        thread.join()
    assert not pool.snapshot()
    with torch.cuda.use_mem_pool(pool, device=1):
        others.append(torch.zeros(8, device="cuda:1"))
    assert [each["device"] for each in pool.snapshot()] == [1]


def test_ways_to_route_allocations() -> None:
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()
    kept = []
    with torch.cuda.stream(side):
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        kept.append(mebibyte())
    assert [each["stream"] for each in segments(pool)] == [side.stream_id]
    torch._C._cuda_endAllocateToPool(0, pool)
    with torch.cuda.stream(side):
        kept.append(mebibyte())
    assert states(pool) == ["active_allocated", "inactive"]
    torch._C._cuda_releasePool(0, pool)
    torch._C._cuda_beginAllocateToPool(0, pool)
    thread = threading.Thread(target=lambda: kept.append(mebibyte()))
    thread.start()
    thread.join()
    torch._C._cuda_endAllocateToPool(0, pool)
    torch._C._cuda_releasePool(0, pool)
    assert len(segments(pool)) == 2
    kept.clear()
    torch.cuda.empty_cache()
    assert not segments(pool)


def test_pluggable_allocators_and_pools_of_other_targets_are_refused() -> None:
    for given in ({"allocator": object()}, {"use_on_oom": True}, {"no_split": True}):
        with pytest.raises(NotSupportedError, match=next(iter(given))):
            torch.cuda.MemPool(**given)
    pool = torch.cuda.MemPool()
    with torchdevice.portable("cpu"):
        for call in (torch.cuda.MemPool, lambda: torch.cuda.use_mem_pool(pool).__enter__()):
            with pytest.raises(NotSupportedError):
                call()


@pytest.mark.usefixtures("no_collections")
def test_a_graph_keeps_its_memory_reserved_until_it_ends() -> None:
    x = torch.ones(1000, device="cuda")
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        for _ in range(5):
            y = y * 2
    pool = graph.pool()
    # The values between are free for others.
    assert pool[1] == 0 and states(pool).count("active_allocated") == 1
    for value in (2, 3):
        x.fill_(value)
        graph.replay()
        assert float(y[0]) == (value + 1) * 32
    del y
    torch.cuda.empty_cache()
    assert states(pool) == ["inactive"]
    graph.replay()
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    assert not segments(pool) and torch.cuda.memory_reserved() == before


def test_graphs_that_share_a_pool_reuse_its_memory() -> None:
    x = torch.ones(2 * MIB, dtype=torch.uint8, device="cuda")
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    pool = torch.cuda.graph_pool_handle()
    results = []
    for at, graph in enumerate(graphs):
        with torch.cuda.graph(graph, pool=pool):
            results.append((x + at) * 2)
    assert len(segments(pool)) == 1 and all(graph.pool() == pool for graph in graphs)
    for graph in reversed(graphs):
        graph.replay()
    assert [int(each[0]) for each in results] == [2, 4, 6]
    graphs[0].reset()
    del results
    torch.cuda.empty_cache()
    assert len(segments(pool)) == 1
    graphs.clear()
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    assert not segments(pool)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("shape", [(1024, 1024), (1024, 512)])  # contiguous, and a transposed part
def test_a_capture_allocates_nothing_of_its_own(shape: tuple[int, int]) -> None:
    """A capture's copies of read and written tensors are not in the device's memory."""
    whole = torch.ones(1024, 1024, device="cuda")
    x = whole[: shape[1], : shape[0]].t()
    count, graph = torch.ones(MIB, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        y = x + x
        count += 1
    blocks = [
        block["requested_size"] for each in segments(graph.pool()) for block in each["blocks"]
    ]
    assert sum(blocks) == y.nbytes and len(segments(graph.pool())) == 1
    assert torch.cuda.max_memory_allocated() == before + y.nbytes
    assert float(count[0]) == 1
    graph.replay()
    assert float(y[0, 0]) == 2 and float(count[-1]) == 2


def test_streams_of_a_capture_use_the_pool() -> None:
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph):
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = y + 1
        torch.cuda.current_stream().wait_stream(side)
    assert len({each["stream"] for each in segments(graph.pool())}) == 2 and z.shape == y.shape


def test_the_pool_of_a_capture_that_fails_ends_with_its_graph() -> None:
    """An H200 empties its cache in a later capture: the pool is not free (conformance.json)."""
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError), torch.cuda.graph(graph, pool=pool):
        y = torch.ones(8, device="cuda") + 1
        y.sum().item()
    del y
    gc.collect()
    torch.cuda.empty_cache()
    assert len(segments(pool)) == 1
    del graph
    torch.cuda.empty_cache()
    assert not segments(pool) and mebibyte().sum() == 0


@pytest.mark.parametrize("change", ["resize", "view", "out", "inplace", "conj"])
def test_a_graph_has_the_memory_of_dropped_tensors(change: str) -> None:
    x = torch.arange(24.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        if change == "resize":
            z = (y * 2).resize_(6, 4)[1:].clone()
        elif change == "view":
            z = y.view(6, 4).t()[1:3].contiguous() * 2
        elif change == "out":
            held = torch.empty(24, device="cuda")
            torch.mul(y, 2, out=held)
            z = held + 1
            del held
        elif change == "inplace":
            y[3:].mul_(2)
            z = y.clone()
        else:
            z = torch.view_as_real(torch.complex(y, y).conj() * 1j)
        del y
    expected = []
    for value in (1.0, 5.0):
        x.copy_(torch.arange(24.0) * value)
        graph.replay()
        expected.append(z.cpu())
    w = torch.arange(24.0) * 5 + 1
    plain = {
        "resize": lambda: (w * 2).view(6, 4)[1:],
        "view": lambda: w.view(6, 4).t()[1:3] * 2,
        "out": lambda: w * 2 + 1,
        "inplace": lambda: torch.cat([w[:3], w[3:] * 2]),
        "conj": lambda: torch.view_as_real(torch.complex(w, w).conj() * 1j),
    }[change]()
    assert torch.equal(expected[1], plain) and not torch.equal(expected[0], plain)


def blocks_of(pool: tuple[int, int]) -> list[tuple[int, int, str]]:
    return [
        (each["address"], each["size"], each["state"])
        for part in segments(pool)
        for each in part["blocks"]
    ]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("seed", range(4))
def test_a_pool_is_laid_out_as_at_its_checkpoint(seed: int) -> None:
    """Later tensors lose their blocks; the block of a gone one is freed by its address."""
    draw = random.Random(seed)
    pool = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
    sizes = [draw.choice((1, 600, 4000, 700_000, 3 << 20)) for _ in range(40)]
    made = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    kept = [each for each in made if draw.random() < 0.5]
    del made
    before, state = blocks_of(pool), torch._C._cuda_getCheckpointState(0, pool)
    gone = kept.pop(draw.randrange(len(kept))).data_ptr()
    later = [torch.empty(draw.choice(sizes), dtype=torch.uint8, device="cuda") for _ in range(10)]
    torch._C._cuda_endAllocateToPool(0, pool)
    with pytest.raises(
        RuntimeError, match="stale tensors which are being manually freed must be passed"
    ):
        torch._C._cuda_setCheckpointPoolState(0, state, [], [])
    assert blocks_of(pool) != before
    torch._C._cuda_setCheckpointPoolState(
        0, state, [each.untyped_storage()._cdata for each in later], []
    )
    # Segments that the pool got since are free.
    assert [block for block in blocks_of(pool) if block in before] == before
    assert not torch._C._cuda_checkPoolLiveAllocations(
        0, pool, {gone, *(each.data_ptr() for each in kept)}
    )
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool, {each.data_ptr() for each in kept})
    del later
    assert [block for block in blocks_of(pool) if block in before] == before, (
        "tensors without blocks free none"
    )
    torch.cuda.caching_allocator_delete(gone)
    del kept
    torch._C._cuda_releasePool(0, pool)
    torch.cuda.empty_cache()
    assert not blocks_of(pool) and torch.cuda.memory_allocated() == 0


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_memory_by_its_address(target: str) -> None:
    with torchdevice.portable(target=target):
        before = torch.cuda.memory_allocated()
        address = torch.cuda.caching_allocator_alloc(1000)
        if target != "cpu":
            assert torch.cuda.memory_allocated() == before + 1024
        ctypes.memset(address, 1, 1000)
        torch.cuda.caching_allocator_delete(address)
        if target != "cpu":
            assert torch.cuda.memory_allocated() == before
        with pytest.raises(RuntimeError, match=f"invalid device pointer: {address:#x}"):
            torch.cuda.caching_allocator_delete(address)


def test_what_trees_of_graphs_need_besides_is_refused() -> None:
    pool = torch.cuda.graph_pool_handle()
    x = torch.ones(8, device="cuda")
    for call, remedy in (
        (
            lambda: torch._C._cuda_setCheckpointPoolState(
                0, (pool, {}), [], [x.untyped_storage()._cdata]
            ),
            "Give no",
        ),
        (lambda: torch._C._cuda_beginAllocateCurrentStreamToPool(0, pool), "Use torch"),
        (
            lambda: torch._C._construct_storage_from_data_pointer(x.data_ptr(), x.device, x.nbytes),
            "Use torch",
        ),
    ):
        with pytest.raises(NotSupportedError, match=remedy):
            call()
