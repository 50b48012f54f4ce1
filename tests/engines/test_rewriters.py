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


def test_a_pinned_tensor_is_the_hosts() -> None:
    with torchdevice.portable("cpu"):
        pinned = torch.ones(2).pin_memory()
        assert pinned.cpu() is pinned and pinned.to("cpu") is pinned
        moved = pinned.to("cuda")
        moved.add_(1)
        assert pinned.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("target", "identity", "name"),
    [
        ("simulated:cuda", "target", "simulated"),
        ("simulated:mps", "target", "mps"),
        ("simulated:mps", "program", "cuda"),
    ],
)
def test_a_tensor_of_the_device_cannot_be_pinned(target: str, identity: Any, name: str) -> None:
    with torchdevice.portable(target, identity=identity):
        x = torch.ones(2, device="cuda")
        with pytest.raises(
            RuntimeError, match=f"^cannot pin 'torch.{name}.FloatTensor' only dense"
        ):
            x.pin_memory()


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_recorded_stream_does_nothing_unless_order_is_observed(
    engine: Any, as_keyword: bool
) -> None:
    def reported(target: str) -> list[Any]:
        with torchdevice.portable(target, engine=engine) as scope:
            x, stream = torch.ones(2, device="cuda"), torch.cuda.Stream()
            _ = x.record_stream(s=stream) if as_keyword else x.record_stream(stream)
        return [
            entry.fidelity
            for entry in scope.journal.entries
            if entry.requested == "Tensor.record_stream"
        ]

    assert reported("cpu") == [torchdevice.Fidelity.INERT]
    assert reported("simulated:cuda") == []


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_module_moves_where_the_program_sees_its_own_device(engine: Any) -> None:
    with torchdevice.portable("simulated:mps", identity="program", engine=engine):
        module = torch.nn.Linear(2, 2).to("cuda")
        assert module.weight.is_cuda and module(torch.ones(2, device="cuda")).is_cuda
        # The program's own call gets the program's device.
        device = torch._C._nn._parse_to("cuda")[0]
        assert device == torch.device("cuda", 0) or device == torch.device("cuda")


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_device_by_keyword_may_follow_positions_that_are_left_out(engine: Any) -> None:
    with torchdevice.portable("simulated:cuda", engine=engine):
        nested = torch._nested_tensor_from_tensor_list([torch.ones(2)], device="cuda")
        assert nested.device == torch.ones(1, device="cuda").device


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_tensor_is_of_one_accelerator_or_of_none(engine: Any) -> None:
    def kinds(x: torch.Tensor) -> list[bool]:
        return [x.is_cpu, x.is_cuda, x.is_mps, x.is_xpu]

    with torchdevice.portable("simulated:mps", identity="program", engine=engine):
        assert kinds(torch.ones(1)) == [True, False, False, False]
        assert kinds(torch.ones(1, device="cuda")) == [False, True, False, False]
