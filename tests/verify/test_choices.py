"""Indices are verified by chosen elements, and writes of only the CPU are found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import planted

import torchdevice
from torchdevice.report.discrepancies import findings_of
from torchdevice.simulation.allocator.storages import memory_of


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs of findings be written to a folder of the test."""
    monkeypatch.chdir(tmp_path)


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], list[float], list[int], list[int]]] = {
    "argmax": (torch.argmax, [3, 3, 2], [1], [2]),
    "argmin": (lambda x: x.argmin(0), [2, 2, 3], [1], [2]),
    "sort": (torch.sort, [1, 1, 2], [1, 0, 2], [2, 1, 0]),
    "topk": (lambda x: x.topk(2), [5, 5, 1], [1, 0], [0, 0]),
    "max.dim": (lambda x: x.max(0), [4, 4, 1], [1], [2]),
}
"""Operator -> a call, elements of which two are equal, other indices that are right too, and wrong
ones.
"""


def choosing(indices: list[int]) -> Callable[..., Any]:
    """Return a kernel that returns these indices."""

    def kernel(right: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        chosen = result if isinstance(result, torch.Tensor) else result[1]
        memory_of(chosen).view(-1)[:] = torch.tensor(indices)
        return result

    return kernel


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("right", [True, False])
def test_a_tie_hides_no_wrong_index(name: str, right: bool) -> None:
    call, elements, other, wrong = CALLS[name]
    with planted(name, choosing(other if right else wrong)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torchdevice.simulate(verify=True) as scope:
            call(torch.tensor(elements, device="cuda"))
    assert bool(findings_of(scope.journal)) != right


def test_statistics_that_only_the_cpu_updates() -> None:
    def forgets(right: Any, *args: Any, **kwargs: Any) -> Any:
        held = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
        return right(*held, **kwargs)

    with planted("native_batch_norm", forgets), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torchdevice.simulate(verify=True) as scope:
            torch.nn.BatchNorm1d(3).cuda()(torch.rand(4, 3, device="cuda"))
    assert any(
        each.kind == "not written" and "running_mean" in each.what
        for each in findings_of(scope.journal)
    )
