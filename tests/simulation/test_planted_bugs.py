"""Every planted bug ends with an error or wrong data, and its correct twin does not."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from places import ROOT
from planted_bugs import BUGS, Planted, begin_group, end_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchdevice
from torchdevice.errors import RaceError


@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.name)
def test_a_bug_and_its_twin(planted: Planted) -> None:
    if planted.name == "used_in_a_fork" and sys.platform == "win32":
        pytest.skip("there are no forks")
    error = planted.run(False)
    assert error is not None, "the bug was not found"
    assert isinstance(error, RaceError) or "races" not in planted.options
    assert planted.run(True) is None


def test_there_are_many_kinds_and_their_names_differ() -> None:
    names = {planted.name for planted in BUGS}
    assert len(BUGS) == len(names) >= 30 and len({planted.kind for planted in BUGS}) == 6


def test_the_page_has_a_line_for_each() -> None:
    page = (ROOT / "docs" / "tested.md").read_text()
    assert all(planted.mistake in page for planted in BUGS)


@pytest.fixture
def group() -> Iterator[None]:
    with torchdevice.simulate(races="error", asynchronous=True):
        begin_group()
        yield
        end_group()


@pytest.mark.usefixtures("no_collections")
def test_collectives_in_correct_programs(group: None) -> None:
    """A parallel model, a collective on a side stream, one of a batch still being copied."""
    model = DistributedDataParallel(nn.Linear(4, 2).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(3, 4, device="cuda")).sum().backward()
        optimizer.step()
    side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    torch.cuda.current_stream().wait_stream(side)
    batch = torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    dist.all_reduce(batch, async_op=True).wait()
    assert (x + batch).tolist() == [2, 2, 2]


def test_work_without_an_answer_is_ordered_by_its_future(group: None) -> None:
    x = torch.ones(3, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    assert work.is_completed() and work.get_future().value()[0].tolist() == [1, 1, 1]
    assert (x + 1).tolist() == [2, 2, 2]
