"""Objects of the program that are falsy: they are there all the same."""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.kernel import patching


class Falsy:
    """Something that can be called and has no elements, as a registry of callbacks has at first."""

    def __init__(self, function: Any = lambda: None):
        self.function = function
        self.found: list[Any] = []

    def __len__(self) -> int:
        return 0

    def __call__(self, *args: Any) -> Any:
        self.found.append((torchdevice.current() is not None, torch.cuda.is_available()))
        return self.function()


class FalsyError(Exception):
    def __bool__(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def scope() -> Any:
    with torchdevice.portable("cpu") as scope:
        yield scope


def test_an_initializer_runs_in_the_scope() -> None:
    initializer = Falsy()
    with ThreadPoolExecutor(1, initializer=initializer) as pool:
        assert pool.submit(torch.cuda.is_available).result()
    assert initializer.found == [(True, True)]


def test_a_target_runs_in_the_scope() -> None:
    target = Falsy()
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert target.found == [(True, True)]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no such signal")
def test_a_handler_waits_for_a_call_to_end() -> None:
    handler = Falsy()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        signal.raise_signal(signal.SIGUSR1)
        with torchdevice.portable("cpu"):
            signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handler.found == [(True, True)] * 2


def test_an_error_goes_through_every_exit() -> None:
    def failing(error: Exception) -> None:
        raise error

    first, second = FalsyError("the first"), ValueError("the second")
    with pytest.raises(FalsyError) as caught:
        patching.do_all([lambda: failing(first), lambda: failing(second)])
    assert caught.value is first
    with pytest.raises(FalsyError), torchdevice.simulate():
        failing(first)
    with pytest.raises(FalsyError):
        x = torch.ones(2, device="cuda", requires_grad=True)
        x.register_hook(lambda grad: failing(first))
        x.sum().backward()


def test_modules_and_tensors() -> None:
    """A module list without modules and a tensor of zeros are falsy."""
    empty = torch.nn.ModuleList().to("cuda")
    assert not empty and isinstance(empty.cuda(), torch.nn.ModuleList)
    zero = torch.zeros((), device="cuda")
    assert not zero and torch.add(zero, 1, out=torch.zeros((), device="cuda")).item() == 1
