"""What the kernels of a simulated device see of its storages: views, devices, missing values."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import torchdevice
from torchdevice.simulation.allocator import storages

pytestmark = pytest.mark.one_engine


def test_a_view_is_never_given_to_a_tensor_of_another_shape() -> None:
    """The last view of a storage is kept; views of one address differ in their shapes alone."""
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x[:6],
        lambda x: x[:3],
        lambda x: x[:2],
        lambda x: x[:6].view(2, 3),
        lambda x: x[:6:2],
        lambda x: x.view(2, 6),
        lambda x: x.view(2, 6)[:, :3],
        lambda x: x.view(2, 6)[:, :3].t(),
    ]
    values = torch.arange(12.0)
    with torchdevice.simulate():
        x = values.to("cuda")
        for view in itertools.chain(*itertools.permutations(views, 2)):
            assert torch.equal((view(x) + 1).cpu(), view(values) + 1)


@pytest.mark.parametrize("index", [0, 2])
def test_a_device_without_an_index_is_the_one_that_is_meant(index: int) -> None:
    with storages.meaning(index):
        assert storages.index_meant(None) == index
        assert storages.index_meant(torch.device("cuda")) == index
        assert storages.index_meant(torch.device("cuda", 1)) == 1


def test_a_storage_forgets_its_values_once() -> None:
    with torchdevice.simulate():
        x = torch.ones(3, device="cuda")
        allocated = torch.cuda.memory_allocated()
        storage = x.untyped_storage()
        assert not storages.has_no_values(storage)
        for _ in range(2):
            storages.forget_values(storage)
            assert storages.has_no_values(storage)
            assert torch.cuda.memory_allocated() == allocated
        storages.forget_values(torch.ones(3).untyped_storage())  # none of the device's


@pytest.mark.parametrize("compute", [None, "meta"])
def test_a_result_without_memory_has_its_shape(compute: str | None) -> None:
    with torchdevice.simulate(compute=compute):
        x = torch.ones(4, 3, device="cuda")
        allocated = torch.cuda.memory_allocated()
        for result in (x[:0] * 2, x[:, :0] + 1, torch.zeros(0, 5, device="cuda")):
            assert result.is_cuda and result.numel() == 0
            assert (result + 1).shape == result.shape
        assert torch.cuda.memory_allocated() == allocated
