"""Tensors of a failed, caught call end with the program's last reference, as without a scope."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.calls import error_texts
from torchdevice.errors import NoValueError, RaceError
from torchdevice.kernel.context import Context


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


Failing = Callable[[torch.Tensor], Any]


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise ValueError("of the program")


def _backward(x: torch.Tensor) -> None:
    _Raising.apply(x.detach().requires_grad_()).sum().backward()


FAILING: dict[str, Failing] = {
    "sizes": lambda x: x + torch.ones(7, device="cuda"),
    "sizes, in place": lambda x: x.add_(torch.ones(7, device="cuda")),
    "sizes, with out": lambda x: torch.add(
        x, torch.ones(7, device="cuda"), out=torch.empty(3, device="cuda")
    ),
    "another device": lambda x: x + torch.ones(1000),
    "an index": lambda x: x[2000],
    "dimensions": lambda x: x.view(7, 7),
    "a dtype": lambda x: x.long() @ x.long().t(),
    "a dtype that CUDA lacks": lambda x: torch.linalg.svd(x.half().reshape(10, 100)),
    "no device": lambda x: x.to("cuda:77"),
    "an ordinal": lambda x: torch.cuda.set_device(77),
    "memory": lambda x: torch.empty(1 << 50, device="cuda"),
    "memory of a result": lambda x: x.expand(1 << 40, 1000).clone(),
    "an error of the program in backward": _backward,
    "a second backward": lambda x: [y.backward() for y in [(x.requires_grad_() ** 2).sum()] * 2],
    "a module": lambda x: torch.nn.Linear(7, 7, device="cuda")(x),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "a convolution": lambda x: torch.nn.functional.conv2d(x, x),
    "a copy": lambda x: x.copy_(torch.ones(7)),
    "a list": lambda x: torch.cat([x, x.reshape(10, 100)]),
    "not supported": lambda x: torch.cuda.caching_allocator_alloc(10**20),
}


def ended_at_once(failing: Failing) -> bool:
    """Return whether a tensor of an error's frame ends once the error is caught."""

    def call() -> Any:
        x = torch.ones(1000, device="cuda")
        seen.append(weakref.ref(x))
        failing(x)

    seen: list[Any] = []
    failed = True
    with contextlib.suppress(Exception):
        call()
        failed = False
    assert failed, "the call does not fail"
    return seen[0]() is None


@pytest.mark.parametrize("name", FAILING)
def test_on_simulated_devices(name: str) -> None:
    for native in ("never", "auto"):
        with torchdevice.simulate(memory="8GiB", native=native):
            before = torch.cuda.memory_allocated()
            assert ended_at_once(FAILING[name]), native
            assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", FAILING)
def test_where_a_finalizer_enters_a_scope_meanwhile(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry looks at the variables of the mode's frame, which Python then keeps a copy of."""
    reword = error_texts.reword

    def enter_and_reword(context: Context, error: BaseException) -> None:
        with torchdevice.simulate(memory="8GiB"):
            reword(context, error)

    monkeypatch.setattr(error_texts, "reword", enter_and_reword)
    with torchdevice.simulate(memory="8GiB"):
        assert ended_at_once(FAILING[name])


RIGHT_ON_A_CPU = {"another device", "a dtype", "no device", "an ordinal"}


@pytest.mark.parametrize("name", sorted(FAILING.keys() - RIGHT_ON_A_CPU))
def test_on_a_cpu_target(name: str) -> None:
    with torchdevice.portable("cpu"):
        assert ended_at_once(FAILING[name])


def _race(x: torch.Tensor) -> None:
    x.add_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)


def test_errors_of_recorders() -> None:
    with torchdevice.simulate(races="error"), pytest.raises(RaceError):
        _race(torch.ones(4, device="cuda"))
    with torchdevice.simulate(races="error"):
        assert ended_at_once(_race)
    with torchdevice.simulate(compute="meta"), pytest.raises(NoValueError):
        torch.ones(4, device="cuda").nonzero()
    with torchdevice.simulate(compute="meta"):
        assert ended_at_once(torch.nonzero)


def test_devices_that_are_lost() -> None:
    with torchdevice.simulate():
        x = torch.ones(4, device="cuda")
        with contextlib.suppress(Exception):
            torch.ones(4, device="cuda")[torch.tensor([9], device="cuda")]
        seen = weakref.ref(x)

        def use(x: torch.Tensor) -> None:
            x.sum()

        with contextlib.suppress(torch.AcceleratorError):
            use(x)
            raise AssertionError("the device works")
        del x
        assert seen() is None
