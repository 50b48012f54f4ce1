"""What a scope on simulated devices owns, and that no other scope of the process sees it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.kernel.thread_state import state
from torchdevice.simulation import machine

MIB = 1 << 20


def megabytes(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8, device="cuda")


@contextmanager
def beside(**options: Any) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Run functions in another thread, which enters a scope of its own at the first of them."""
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    calls: list[Callable[[], Any] | None] = []
    answers: list[Any] = []

    def work() -> None:
        assert asked.acquire() and not state.entries
        with torchdevice.simulate("cuda", **options):
            while (call := calls.pop()) is not None:
                try:
                    answers.append(call())
                except Exception as error:
                    answers.append(error)
                answered.release()
                asked.acquire()

    def run(call: Callable[[], Any] | None) -> Any:
        calls.append(call)
        asked.release()
        if call is not None:
            assert answered.acquire(timeout=60)
            return answers.pop()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield run
    finally:
        run(None)
        thread.join()


@pytest.mark.usefixtures("no_collections")
def test_two_scopes_have_memory_of_their_own() -> None:
    with beside(memory="100MiB") as other, torchdevice.simulate("cuda", memory="100MiB"):
        mine = megabytes(80)
        theirs = other(lambda: megabytes(80))
        assert isinstance(theirs, torch.Tensor), theirs
        assert torch.cuda.memory_allocated() == other(torch.cuda.memory_allocated) == 80 * MIB
        with pytest.raises(torch.cuda.OutOfMemoryError):
            megabytes(30)
        del theirs
        assert (
            other(torch.cuda.memory_allocated) == 0 and torch.cuda.memory_allocated() == mine.nbytes
        )


@pytest.mark.usefixtures("no_collections")
@pytest.mark.filterwarnings("ignore:.*_set_allocator_settings")
def test_a_new_scope_keeps_the_settings_and_the_cache_of_others() -> None:
    with beside() as other, torchdevice.simulate("cuda"):
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:64")
        cached = megabytes(50)
        del cached
        before = torch.cuda.memory_stats()
        assert other(torch.cuda.memory_reserved) == 0
        other(lambda: torch.cuda.memory._set_allocator_settings("max_split_size_mb:32"))
        assert torch.cuda.memory_stats() == before and before["max_split_size"] == 64 * MIB
        assert torch.cuda.memory_reserved() == 50 * MIB


@pytest.mark.usefixtures("no_collections")
@pytest.mark.filterwarnings("ignore:.*_set_allocator_settings")
def test_a_new_scope_begins_clean() -> None:
    scope = torchdevice.simulate("cuda")
    with scope:
        megabytes(40)
        generator = torch.cuda.get_rng_state()
        torch.rand(3, device="cuda")
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:64")
    for again in (scope, torchdevice.simulate("cuda")):
        with again:
            found = torch.cuda.memory_stats()
            assert torch.cuda.max_memory_allocated() == found["reserved_bytes.all.peak"] == 0
            assert found["allocated_bytes.all.allocated"] == 0 and found["max_split_size"] == -1
    with torchdevice.simulate("cuda"):
        assert torch.equal(torch.cuda.get_rng_state(), generator)


@pytest.mark.usefixtures("no_collections")
def test_a_scope_that_is_entered_again_is_the_same_gpu() -> None:
    scope = torchdevice.simulate("cuda", memory="100MiB")
    with scope:
        model = megabytes(60)
    with scope:
        assert torch.cuda.memory_allocated() == model.nbytes
        with pytest.raises(torch.cuda.OutOfMemoryError):
            megabytes(60)


@pytest.mark.usefixtures("no_collections")
def test_a_tensor_of_an_ended_scope_keeps_its_values_and_its_memory_there() -> None:
    ended = torchdevice.simulate("cuda")
    with ended:
        kept = torch.arange(8.0, device="cuda")
    with torchdevice.simulate("cuda"):
        assert torch.cuda.memory_allocated() == 0
        assert (kept + 1).tolist() == list(range(1, 9))
        sum_of = kept + kept
        assert torch.cuda.memory_allocated() == 512 and sum_of.device == kept.device
        kept.resize_(4 * MIB)
        assert torch.cuda.memory_allocated() == 512
    with ended:
        assert torch.cuda.memory_allocated() == 16 * MIB
        del kept
        assert torch.cuda.memory_allocated() == 0


@pytest.mark.usefixtures("no_collections")
def test_scopes_inside_another_share_its_machine() -> None:
    with torchdevice.simulate("cuda", memory="100MiB"):
        outer = megabytes(60)
        torch.cuda.manual_seed(3)
        with torchdevice.simulate("cuda", memory="50MiB"):
            assert torch.cuda.memory_allocated() == outer.nbytes and torch.cuda.initial_seed() == 3
            with pytest.raises(torch.cuda.OutOfMemoryError):
                megabytes(30)
        inner = megabytes(30)
        with torchdevice.portable("cpu"):
            added = outer[:512] + 1
        assert torch.cuda.memory_allocated() == outer.nbytes + inner.nbytes + added.nbytes


@pytest.mark.usefixtures("no_collections")
def test_a_thread_that_inherits_a_scope_has_its_machine() -> None:
    found = []
    with torchdevice.simulate("cuda"):
        kept = megabytes(3)
        thread = threading.Thread(
            target=lambda: found.extend([megabytes(1), torch.cuda.memory_allocated()])
        )
        thread.start()
        thread.join()
        assert found[1] == torch.cuda.memory_allocated() == kept.nbytes + MIB


def test_a_lost_device_is_lost_in_its_machine_alone() -> None:
    def fail() -> None:
        torch.ones(3, device="cuda")[torch.tensor([7], device="cuda")]

    with beside() as other, torchdevice.simulate("cuda") as scope:
        with pytest.raises(torch.AcceleratorError):
            fail()
        with torchdevice.simulate("cuda"), pytest.raises(torch.AcceleratorError):
            torch.ones(1, device="cuda")
        with pytest.raises(torch.AcceleratorError):
            torch.ones(1, device="cuda")
        assert other(lambda: torch.ones(1, device="cuda").item()) == 1
    with torchdevice.simulate("cuda"):
        assert torch.ones(1, device="cuda").item() == 1
    with scope:
        assert torch.ones(1, device="cuda").item() == 1


OTHERS = [
    {"races": "error"},
    {"asynchronous": True},
    {"memory": "1GiB"},
    {"compute": "meta"},
    {"races": "warn", "asynchronous": True, "memory": "1GiB"},
]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_kernels_ask_nothing_whatever_other_scopes_ask(options: dict[str, Any]) -> None:
    def asks() -> bool:
        assert state.context is not None
        return state.context.policy.asks

    with beside(**options) as other, torchdevice.simulate("cuda", memory="1GiB"):
        torch.cuda.set_per_process_memory_fraction(0.5)
        other(lambda: torch.ones(3, device="cuda") + 1)
        assert not asks() and other(asks) is (options != {"memory": "1GiB"})
        with torchdevice.simulate("cuda", **options):
            assert asks() is (options != {"memory": "1GiB"})
        assert not asks()


def test_no_two_tensors_without_values_have_one_address() -> None:
    tensors = []
    for _ in range(3):
        with torchdevice.simulate("cuda", count=2, compute="meta"):
            tensors += [torch.empty(4 * MIB, device=f"cuda:{index}") for index in (0, 1)]
    assert len({each.untyped_storage().data_ptr() for each in tensors}) == len(tensors)


@pytest.mark.usefixtures("no_collections")
def test_a_machine_ends_with_its_last_user() -> None:
    with torchdevice.simulate("cuda", native="never"):
        tensor = torch.ones(3, device="cuda")
        assert state.context is not None
        machine = weakref.ref(state.context.devices.machine)
        memory = weakref.ref(state.context.devices.machine.memory[0])
    gc.collect()
    assert machine() is None and memory() is not None and tensor.tolist() == [1, 1, 1]
    del tensor
    with torchdevice.simulate("cuda"):
        torch.ones(3, device="cuda")  # what has ended is released at the next allocation
    gc.collect()
    assert memory() is None


def test_copies_and_fallbacks_are_counted_by_machine() -> None:
    lacking = 'simulated:{"base": "mps"}'
    with torchdevice.portable(lacking):
        torch.linalg.eig(torch.eye(2).cuda())
        assert machine.current().fallbacks and machine.current().copies
    with torchdevice.portable(lacking):
        assert not machine.current().fallbacks and not machine.current().copies
