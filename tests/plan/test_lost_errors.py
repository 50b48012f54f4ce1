"""Errors that end a part of a planned program, and that nobody reads."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

import torchdevice
from torchdevice.plan import peaks as peaks_module

pytestmark = pytest.mark.one_engine

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["future", "map", "process", "task"])
@pytest.mark.parametrize("is_read", [False, True])
def test_an_error_that_nobody_reads(kind: str, is_read: bool) -> None:
    """A program that drops a future loses its error, and the memory of what would have followed."""
    before = vars(Future).copy()
    with torchdevice.simulate(compute="meta", values="assume") as scope:
        found = peaks_module.Peaks()
        found.follow()
        kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        LOSING[kind](is_read)
        said = peaks_module.data(found, scope.report(), None)
        found.stop()
    assert vars(Future) == before and not logging.getLogger("asyncio").filters
    assert said["finished"] is is_read and kept.numel() == MIB
    part = "a task" if kind == "task" else "a future"
    at = (
        ""
        if kind == "process"
        else f" at test_lost_errors.py:{failing.__code__.co_firstlineno + 1}"
    )
    assert said["ended"] == ("" if is_read else f"{part} ended by ZeroDivisionError{at}")


def failing(number: int = 0) -> float:
    return 1 / number


def lose_a_future(is_read: bool) -> None:
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(failing)
        assert executor.submit(failing, 2).result() == 0.5
    assert not is_read or isinstance(future.exception(), ZeroDivisionError)


def lose_a_result_of_map(is_read: bool) -> None:
    with ThreadPoolExecutor(1) as executor:
        results = executor.map(failing, [1, 0])
        assert next(results) == 1
        if is_read:
            with pytest.raises(ZeroDivisionError):
                next(results)


def lose_a_result_of_a_process(is_read: bool) -> None:
    future: Future[float] = Future()  # as an executor of processes fills it, without a traceback
    future.set_exception(ZeroDivisionError())
    if is_read:
        with pytest.raises(ZeroDivisionError):
            future.result()


def lose_a_task(is_read: bool) -> None:
    async def work() -> float:
        return failing()

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not is_read or isinstance(task.exception(), ZeroDivisionError)

    asyncio.run(main())


LOSING = {
    "future": lose_a_future,
    "map": lose_a_result_of_map,
    "process": lose_a_result_of_a_process,
    "task": lose_a_task,
}
