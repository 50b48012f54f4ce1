"""What rewriters do beside the result of a call: reports, figures of memory, pinned tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice

CALLS: list[Callable[[], Any]] = [
    lambda: torch.device(0),
    lambda: torch.device("cuda"),
    lambda: torch.device("cuda", 0),
    lambda: torch.zeros(2, device="cuda"),
    lambda: torch.hann_window(4, device="cuda"),
    lambda: torch.ones(2).to("cuda"),
    lambda: torch.ones(2).to(device="cuda"),
    lambda: torch.nn.Linear(2, 2).to("cuda"),
]


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("call", CALLS)
def test_the_report_names_the_line_that_names_the_device(
    call: Callable[[], Any], engine: str
) -> None:
    with torchdevice.portable("cpu", engine=engine) as scope:
        call()
    assert scope.journal.entries
    for entry in scope.journal.entries:
        assert entry.site.function.endswith("<lambda>")
        assert entry.site.line == call.__code__.co_firstlineno


class TestMac:
    """The runtime of MPS, on a simulated Mac, for programs written for CUDA."""

    pytestmark = pytest.mark.lacked_by("npu_like", "simulated device beside it")

    @pytest.mark.parametrize(
        "call",
        [
            lambda: torch.zeros(1 << 18, device="cuda"),
            lambda: torch.zeros(1 << 18).to("cuda"),
            lambda: torch.zeros(1 << 18).cuda(),
        ],
    )
    def test_peaks_of_memory_are_sampled_after_a_call(self, call: Callable[[], Any]) -> None:
        with torchdevice.portable("simulated:mps"):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.max_memory_allocated()
            call()
            assert torch.cuda.max_memory_allocated() - before >= 1 << 20

    def test_a_pinned_tensor_is_on_the_host(self) -> None:
        with torchdevice.portable("simulated:mps"):
            for pinned in (torch.ones(2, pin_memory=True), torch.ones(2).pin_memory()):
                assert pinned.is_cpu and pinned.is_pinned()


@pytest.mark.parametrize("target", ["cpu", "simulated:mps"])
def test_a_pinned_tensor_is_pinned_already(target: str) -> None:
    with torchdevice.portable(target):
        pinned = torch.ones(2).pin_memory()
        assert pinned.pin_memory() is pinned
        assert torch.ones(2).pin_memory() is not pinned
