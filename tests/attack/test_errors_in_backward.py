"""Errors raised while the autograd engine works are unchanged, and never end the process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from processes import run_python

import torchdevice

PROGRAM = Path(__file__).with_name("raising_in_backward.py")


def lines(device: str) -> list[str]:
    result = run_python(str(PROGRAM), device)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def on_cpu() -> list[str]:
    """What comes out of plain torch."""
    return lines("cpu")


def test_every_error_from_every_place_is_the_cpus(on_cpu: list[str]) -> None:
    assert len(on_cpu) > 308 and sum("same=True" in line for line in on_cpu) == 308
    assert not [line for line in on_cpu if not line.endswith("True")]
    assert lines("cuda") == on_cpu


def leaf() -> torch.Tensor:
    return torch.ones(1 << 18, device="cuda", requires_grad=True)


def test_the_devices_own_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")
    with torchdevice.simulate(memory="100MiB"):
        y = (torch.ones(8 << 20, device="cuda", requires_grad=True) * 2).exp()
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            y.sum().backward()
    with torchdevice.simulate("mps"):
        z = leaf()[:9].view(3, 3)
        z.register_hook(torch.linalg.eigvals)
        with pytest.raises(
            (NotImplementedError, RuntimeError),
            match="not currently implemented for the MPS device",
        ):
            z.sum().backward()


def test_an_interrupt_that_a_hook_hears() -> None:
    def interrupt(grad: torch.Tensor) -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with torchdevice.simulate():
            x = leaf()
            x.register_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                x.sum().backward()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_hook_from_before_the_scope_and_a_scope_of_another_device() -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("of the program")

    x = torch.ones(3, requires_grad=True)
    x.register_hook(fail)
    with torchdevice.simulate():
        y = x.to("cuda") * 2
        y.register_hook(fail)
        with torchdevice.portable("cpu"), pytest.raises(ValueError, match="of the program"):
            y.sum().backward()


def test_outside_a_scope_the_process_goes_on() -> None:
    with torchdevice.simulate():
        x = torch.ones(3, device="cuda", requires_grad=True)
        y = x * 2
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises((ZeroDivisionError, SystemError)):
        y.sum().backward()
