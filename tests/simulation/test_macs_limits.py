"""What a program's Mac lacks: NCCL, tensors of 17 dimensions, wrong memory ratios."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from planted_bugs import begin_group, end_group

import torchdevice
from torchdevice.simulation.refusals import watermarks

HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"


@pytest.fixture
def group() -> Iterator[None]:
    yield
    end_group()


@pytest.mark.usefixtures("group")
def test_a_mac_has_no_nccl() -> None:
    with torchdevice.simulate("mps", written_for="mps"):
        assert not dist.is_nccl_available()
        with pytest.raises(RuntimeError, match="Distributed package doesn't have NCCL"):
            begin_group()
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == "gloo"
        end_group()


@pytest.mark.usefixtures("group")
def test_a_program_for_cuda_has_it_there() -> None:
    with torchdevice.simulate("mps"):
        assert dist.is_nccl_available()
        begin_group()
        assert dist.get_backend() == "nccl"
        end_group()


@pytest.mark.parametrize("written_for", ["mps", "cuda"])
def test_a_tensor_has_16_dimensions(written_for: str) -> None:
    text = r"^MPS supports tensors with dimensions <= 16, but got 17\.$"
    with torchdevice.simulate("mps", written_for=written_for):
        assert torch.ones([1] * 16, device=written_for).exp().dim() == 16
        with pytest.raises(RuntimeError, match=text):
            torch.ones([1] * 17, device=written_for)
        view = torch.ones(1, device=written_for).view([1] * 17)
        assert view.dim() == 17, "a view has no memory of its own"
        with pytest.raises(RuntimeError, match=text):
            view.exp()
    with torchdevice.simulate():
        assert torch.ones([1] * 17, device="cuda").exp().dim() == 17


PINNED = {
    "empty": lambda: torch.empty(2, pin_memory=True),
    "tensor": lambda: torch.tensor([1.0, 2.0], pin_memory=True),
    "Tensor.pin_memory": lambda: torch.ones(2).pin_memory(),
}


@pytest.mark.parametrize("make", PINNED)
def test_the_device_of_pinned_memory_depends_on_the_release(make: str) -> None:
    """Until torch 2.13 it is the device (pytorch/pytorch#181374)."""
    is_late = torch.__version__ >= "2.14"
    with torchdevice.simulate("mps", written_for="mps"):
        x = PINNED[make]()
        assert x.is_pinned() and str(x.device) == ("cpu" if is_late else "mps:0")
        assert x.pin_memory().is_pinned()
        assert torch.ones(2).pin_memory().to("mps").tolist() == [1, 1]
        assert torch.empty(2).device.type == "cpu"
    for target in ("simulated:cuda", "simulated:mps", "cpu"):
        with torchdevice.portable(target):  # a program written for CUDA
            assert PINNED[make]().device.type == "cpu" and PINNED[make]().is_pinned()


RATIOS = {
    ("0.7", None): "invalid low watermark ratio 1.4",
    ("1.0", "1.4"): "invalid low watermark ratio 1.4",
    ("3", None): "invalid high watermark ratio 3",
    ("-1", None): "invalid high watermark ratio -1",
    ("0.0", "2.5"): "invalid low watermark ratio 2.5",
}


@pytest.mark.parametrize("ratios", RATIOS)
def test_ratios_are_checked_at_the_first_use(
    ratios: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, ratio in zip((HIGH, LOW), ratios, strict=True):
        if ratio is not None:
            monkeypatch.setenv(name, ratio)
    with torchdevice.simulate("mps", written_for="mps"):
        for _ in range(2):  # MPS is not there afterwards either
            with pytest.raises(RuntimeError, match=f"^{RATIOS[ratios]}$"):
                torch.ones(2, device="mps")
    with torchdevice.simulate():
        torch.ones(2, device="cuda")


def test_a_ratio_limits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HIGH, "0.5")
    monkeypatch.setenv(LOW, "0.4")
    with torchdevice.simulate("mps", written_for="mps", memory="64MiB"):
        torch.empty(20 << 20, dtype=torch.uint8, device="mps")
        with pytest.raises(RuntimeError, match="MPS backend out of memory"):
            torch.empty(40 << 20, dtype=torch.uint8, device="mps")


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [({}, None), ({HIGH: "0"}, 0.0), ({HIGH: "1.5"}, 1.5), ({LOW: "0.1"}, None)],
)
def test_allowed_ratios(
    ratios: dict[str, str], expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, ratio in ratios.items():
        monkeypatch.setenv(name, ratio)
    assert watermarks.high_ratio() == expected
