"""The allocator of the native kernels is the model in Python, figure by figure, whoever leads."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.serving import NativeDevice

pytestmark = [pytest.mark.one_engine, pytest.mark.usefixtures("native_kernels")]

MIB = 1 << 20

SIZES = (
    1,
    511,
    512,
    513,
    5000,
    MIB - 1,
    MIB,
    MIB + 1,
    3 * MIB,
    10 * MIB - 1,
    10 * MIB,
    11 * MIB + 7,
    33 * MIB,
)


def figures() -> dict[str, Any]:
    return {
        **torch.cuda.memory_stats(),
        "figures": (torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()),
    }


def snapshot() -> Any:
    """Return segments without scope-dependent parts: addresses and stream numbers."""
    return [
        (
            each["stream"] != 0,
            each["segment_type"],
            each["total_size"],
            [(block["size"], block["requested_size"], block["state"]) for block in each["blocks"]],
        )
        for each in torch.cuda.memory_snapshot()
    ]


def history(seed: int, native: str, steps: int, memory: str | None) -> Iterator[Any]:
    """Allocate and free at random, and yield what the program sees."""
    draw = random.Random(seed)
    held: list[torch.Tensor] = []
    with torchdevice.simulate(native=native, memory=memory):
        streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
        for _ in range(steps):
            action = draw.random()
            if action < 0.55:
                try:
                    with torch.cuda.stream(streams[draw.random() < 0.1]):
                        held.append(
                            torch.empty(draw.choice(SIZES), dtype=torch.uint8, device="cuda")
                        )
                except torch.OutOfMemoryError as error:
                    yield str(error)
            elif action < 0.93:
                if held:
                    del held[draw.randrange(len(held))]
            elif action < 0.95:
                yield figures()
            elif action < 0.96:
                yield snapshot()
            elif action < 0.97:
                torch.cuda.empty_cache()
            elif action < 0.98:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.reset_accumulated_memory_stats()
            elif held and action < 0.985:
                held[-1].record_stream(streams[1])
            elif held and action < 0.99:
                try:
                    held[-1].untyped_storage().resize_(draw.choice(SIZES))
                except torch.OutOfMemoryError as error:
                    yield str(error)
            else:
                yield torch.cuda.memory_allocated()
        yield figures()
        yield snapshot()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("memory", [None, "200MiB"])
def test_a_random_history_has_the_figures_of_the_model_in_python(
    seed: int, memory: str | None
) -> None:
    expected = list(history(seed, "never", 600, memory))
    found = list(history(seed, "always", 600, memory))
    for one, other in zip(found, expected, strict=True):
        assert one == other


def leading() -> bool:
    device = storages.device(0)
    assert isinstance(device, NativeDevice)
    return bool(device.ledger.leads)


class TestWhoLeads:
    @pytest.mark.usefixtures("no_collections")
    def test_the_ledger_leads_from_the_first_tensor_on(self) -> None:
        with torchdevice.simulate(native="always"):
            held = torch.empty(4, device="cuda")
            assert leading()
            assert torch.cuda.memory_allocated() == 512
            assert torch.cuda.max_memory_allocated() == 512
            del held
            assert torch.cuda.memory_allocated() == 0
            assert leading()

    @pytest.mark.usefixtures("no_collections")
    def test_it_leads_again_after_the_model_answered(self) -> None:
        with torchdevice.simulate(native="always"):
            held = [torch.empty(4, device="cuda") for _ in range(5)]
            torch.cuda.memory_snapshot()
            assert not leading()
            held.append(torch.empty(4, device="cuda"))
            assert leading()
            assert torch.cuda.memory_allocated() == 6 * 512

    @pytest.mark.usefixtures("no_collections")
    def test_it_leads_on_while_kernels_in_python_get_tensors_of_cpp_that_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torchdevice.simulate(native="always"):
            held = torch.empty(4, device="cuda")
            torch.nn.functional.dropout(held)  # the first call of an operator is Python's
            torch.empty(4, device="cuda")
            assert leading()
            monkeypatch.setattr(
                NativeDevice, "_led_in_python", lambda device: pytest.fail("the model leads")
            )
            for _ in range(3):
                # With a GPU's random numbers the kernel is one in Python.
                torch.nn.functional.dropout(torch.ones(8, device="cuda"))
            assert leading()
            monkeypatch.undo()
            assert torch.cuda.memory_allocated() == 512

    @pytest.mark.usefixtures("no_collections")
    def test_it_leads_again_after_a_retry_near_the_limit(self) -> None:
        with torchdevice.simulate(native="always", memory="64MiB"):
            for size in (40, 50, 60):
                held = torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
                del held
            assert torch.cuda.memory_stats()["num_alloc_retries"] == 2
            held = torch.empty(4, device="cuda")
            assert leading()
            with pytest.raises(
                torch.OutOfMemoryError, match="Tried to allocate 64.00 MiB".replace(".", r"\.")
            ):
                torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            del held

    @pytest.mark.usefixtures("no_collections")
    def test_a_kernel_that_runs_out_of_memory_has_no_effect(self) -> None:
        with torchdevice.simulate(native="always", memory="64MiB"):
            given = torch.ones(10 * MIB, device="cuda")
            for _ in range(3):
                with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
                    given + given
            assert torch.cuda.memory_allocated() == 40 * MIB
            assert given.sum().item() == 10 * MIB

    @pytest.mark.usefixtures("no_collections")
    def test_a_pool_of_the_program_is_the_models(self) -> None:
        with torchdevice.simulate(native="always"):
            before = torch.empty(4, device="cuda")
            with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
                inside = torch.empty(4, device="cuda")
            assert not leading()
            assert torch.cuda.memory_allocated() == 1024
            after = torch.add(before, inside)
            assert torch.cuda.memory_allocated() == 1536
            del before, inside, after
            assert torch.cuda.memory_allocated() == 0


def test_tensors_of_python_and_of_c_mix() -> None:
    with torchdevice.simulate(native="never"):
        old = torch.arange(4.0, device="cuda")
    with torchdevice.simulate(native="always"):
        new = torch.arange(4.0, device="cuda")
        assert (old + new).tolist() == [0, 2, 4, 6]
        new.add_(old)
        assert new.tolist() == [0, 2, 4, 6]
    with torchdevice.simulate(native="never"):
        assert (old + new).tolist() == [0, 3, 6, 9]
        new[1:].mul_(old[1:])
        assert new.tolist() == [0, 2, 8, 18]


@pytest.mark.usefixtures("no_collections")
def test_memory_is_the_cpus_again_when_a_tensor_ends() -> None:
    with torchdevice.simulate(native="always"):
        for _ in range(3):
            # A kernel in Python is given each tensor, and keeps a reference to its memory.
            held = torch.full((64 * MIB,), 1, dtype=torch.uint8, device="cuda")
            held.untyped_storage().resize_(0)
            del held
        torch.empty(1, device="cuda")
        assert torch.cuda.memory_allocated() == 0


def test_a_tensor_outlives_its_machine() -> None:
    with torchdevice.simulate(native="always"):
        tensor = torch.ones(3, device="cuda")
    gc.collect()
    assert tensor.tolist() == [1, 1, 1]
    for native in ("never", "always"):
        with torchdevice.simulate(native=native):
            assert (tensor + 1).tolist() == [2, 2, 2]
            tensor.untyped_storage().resize_(16)
            tensor.untyped_storage().resize_(12)
