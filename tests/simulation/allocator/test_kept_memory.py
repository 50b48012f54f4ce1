"""``Tensor.data_ptr`` after a tensor was freed: a block's memory goes to the next tensor in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import torchdevice
from torchdevice.simulation.allocator import kept_memory

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": torch.empty_like,
    "randn": lambda x: torch.randn(x.shape, device="cuda"),
    "a result": lambda x: x + 1,
    "a result with other strides": lambda x: torch.empty_strided(
        (x.numel() // 2, 2), (1, x.numel() // 2), device="cuda"
    ).exp(),
    "a copy from the CPU": lambda x: torch.ones(x.shape).cuda(),
    "clone": torch.clone,
}


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate("cuda") as entered:
        torch.cuda.empty_cache()
        yield entered


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("size", [2, 100, 1000, 30_000, 1_000_000])
def test_the_next_tensor_in_a_block_has_its_address(size: int) -> None:
    x = torch.ones(size, device="cuda")
    for way, make in WAYS.items():
        addresses = set()
        for _ in range(8):
            tensor = make(x)
            addresses.add(tensor.data_ptr())
            del tensor
            len([bytearray(size * 4) for _ in range(20)])  # other users of the host's memory
        assert len(addresses) == 1, way


@pytest.mark.usefixtures("no_collections")
def test_a_smaller_tensor_begins_where_a_larger_one_did() -> None:
    large = torch.zeros(100, device="cuda")
    address = large.data_ptr()
    del large
    small = torch.full((3,), 5.0, device="cuda")
    assert small.data_ptr() == address and small.tolist() == [5.0] * 3
    assert small.untyped_storage().nbytes() == 12
    small.resize_(3000).zero_()  # more than the memory that was kept
    assert small.sum() == 0


@pytest.mark.usefixtures("no_collections")
def test_values_move_with_their_strides_and_bits() -> None:
    known = torch.empty(64, device="cuda")
    address = known.data_ptr()
    del known
    moved = torch.arange(12.0, device="cuda").reshape(3, 4).t().contiguous().t()
    assert moved.tolist() == torch.arange(12.0).reshape(3, 4).tolist()
    del moved
    number = torch.tensor([1 + 2j, 3 - 4j], device="cuda").conj().resolve_conj()
    assert number.tolist() == [1 - 2j, 3 + 4j]
    assert address in {number.data_ptr(), torch.empty(64, device="cuda").data_ptr()}


@pytest.mark.usefixtures("no_collections")
def test_memory_that_another_stream_uses_is_not_used_again() -> None:
    stream = torch.cuda.Stream()
    tensor = torch.zeros(4, device="cuda")
    address = tensor.data_ptr()
    with torch.cuda.stream(stream):
        tensor.add_(1)
    tensor.record_stream(stream)
    del tensor
    other = torch.zeros(4, device="cuda")
    assert other.data_ptr() != address
    torch.cuda.synchronize()
    assert torch.zeros(4, device="cuda").data_ptr() == address


@pytest.mark.usefixtures("no_collections")
def test_tensors_that_live_have_addresses_of_their_own() -> None:
    x = torch.ones(64, device="cuda")
    first = (x + 1).data_ptr()  # freed at once
    living = [x * number for number in range(10)]
    addresses = [each.data_ptr() for each in living]
    assert addresses[0] == first and len(set(addresses)) == 10
    assert [each[0].item() for each in living] == [*range(10)]


@pytest.mark.usefixtures("no_collections")
def test_a_graph_keeps_the_memory_that_it_writes_to() -> None:
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    y.data_ptr()
    graph.replay()
    values = y.tolist()
    del y
    other = torch.full((8,), 7.0, device="cuda")
    graph.replay()
    assert values == [2.0] * 8 and other.tolist() == [7.0] * 8


@pytest.mark.usefixtures("no_collections")
def test_empty_cache_gives_the_memory_up() -> None:
    torch.empty(1000, device="cuda").data_ptr()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert before == 0 and torch.ones(1000, device="cuda").sum() == 1000


def test_no_more_is_kept_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "MOST_BYTES", 1000)
    kept: kept_memory.Kept = {}
    for address in range(8):
        kept_memory.keep(kept, address, torch.UntypedStorage(300))
    assert [*kept] == [5, 6, 7]
    kept_memory.keep(kept, 9, torch.UntypedStorage(2000))
    assert not kept
    monkeypatch.setattr(kept_memory, "MOST_BLOCKS", 2)
    for address in range(8):
        kept_memory.keep(kept, address, torch.UntypedStorage(1))
    assert [*kept] == [6, 7]


def test_a_view_that_lives_on_keeps_its_values() -> None:
    memory = torch.arange(4)
    kept: kept_memory.Kept = {}
    kept_memory.keep(kept, 0, memory.untyped_storage())
    put = torch.Tensor.set_
    assert kept_memory.moved(torch.zeros(4, dtype=torch.int64), kept, 0, put) is None
    assert memory.tolist() == [0, 1, 2, 3] and not kept


def test_threads_free_and_allocate_at_once(scope: torchdevice.Scope) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(150):
            tensor = torch.full((50,), float(number), device="cuda")
            tensor.data_ptr()
            result = tensor + turn
            if result.tolist() != [float(number + turn)] * 50:
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
