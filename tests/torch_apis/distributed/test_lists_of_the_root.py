"""What a rank gathers or scatters is checked as by torch's groups, which compare shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import planted_bugs
import pytest
import torch
import torch.distributed as dist

import torchdevice

WORDS = {
    (dist.gather, 3): "gather: invalid tensor size at index 0 (expected (4), got (3))",
    (dist.gather, (2, 2)): "gather: invalid tensor size at index 0 (expected (4), got (2, 2))",
    (dist.scatter, 3): "scatter: invalid tensor size at index 0 (expected (4), got (3))",
}


@pytest.fixture(params=["nccl", "gloo"])
def backend(request: Any) -> Iterator[str]:
    with torchdevice.simulate():
        dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
        yield request.param
        planted_bugs.end_group()


def refused(backend: str, call: Any) -> str:
    """Return what a group refuses, without its name."""
    error, name = {"nccl": (ValueError, "NCCL"), "gloo": (RuntimeError, "Gloo")}[backend]
    with pytest.raises(error) as found:
        call()
    assert found.type is error
    own, _, text = str(found.value).partition("::")
    assert own == f"ProcessGroup{name}"
    return text.split("\n")[0]


@pytest.mark.parametrize(
    "collective, size", WORDS, ids=lambda each: getattr(each, "__name__", str(each))
)
def test_sizes_are_shapes(backend: str, collective: Any, size: Any) -> None:
    own, other = torch.ones(4, device="cuda"), torch.ones(size, device="cuda")
    assert refused(backend, lambda: collective(own, [other])) == WORDS[collective, size]


@pytest.mark.parametrize("collective, listed", [(dist.gather, "output"), (dist.scatter, "input")])
def test_lists_have_a_tensor_for_each_rank(backend: str, collective: Any, listed: str) -> None:
    own = torch.ones(4, device="cuda")
    name, title = collective.__name__, listed.capitalize()
    assert refused(backend, lambda: collective(own, [own.clone(), own.clone()])) == (
        f"{name}: Incorrect {listed} list size 2. {title} list size should be 1, same as size of "
        "the process group."
    )


def test_the_root_is_a_rank(backend: str) -> None:
    own = torch.ones(4, device="cuda")
    assert refused(backend, lambda: dist.gather(own, None, dst=5)) == (
        "gather: invalid root rank: 5"
    )


def test_what_fits_is_gathered_and_scattered(backend: str) -> None:
    own, other = torch.arange(4.0, device="cuda"), torch.zeros(4, device="cuda")
    dist.gather(own, [other])
    assert torch.equal(own, other)
    dist.scatter(other, [own + 1])
    assert torch.equal(own + 1, other)
