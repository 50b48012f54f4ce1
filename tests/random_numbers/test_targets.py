"""The random numbers of a GPU on targets that are none: the CPU, and a Mac."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from draws import DRAWN
from torch._subclasses import FakeTensorMode
from torch.nn import functional, init
from torch.utils.checkpoint import checkpoint

import torchdevice

pytestmark = pytest.mark.one_engine


@contextlib.contextmanager
def on(where: str, engine: str) -> Iterator[torchdevice.Scope]:
    machine = (
        torchdevice.simulate("mps", written_for="mps")
        if where == "mps"
        else contextlib.nullcontext()
    )
    with machine, torchdevice.portable(where, random="cuda", engine=engine) as scope:  # type: ignore[arg-type]
        yield scope


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    **{name: lambda draws=draws: draws(None) for name, draws in DRAWN.items()},  # type: ignore[misc]
    **{
        f"{name}, a generator": lambda draws=draws: draws(torch.Generator("cuda").manual_seed(5))  # type: ignore[misc]
        for name, draws in DRAWN.items()
    },
    "rand_like": lambda: torch.rand_like(ones(3, 4).t()),
    "randn_like": lambda: torch.randn_like(ones(300)),
    "randint_like": lambda: torch.randint_like(ones(30), 4, 9),
    "out": lambda: torch.rand(5, out=torch.empty(0, device="cuda")),
    "integers, out": lambda: torch.randint(
        4, (5,), out=torch.empty(0, dtype=torch.int64, device="cuda")
    ),
    "a permutation, out": lambda: torch.randperm(
        5, out=torch.empty(0, dtype=torch.int64, device="cuda")
    ),
    "normal of a shape": lambda: torch.normal(1.0, 2.0, (5,), device="cuda"),
    "bounds by name": lambda: ones(5).uniform_(to=3.0),
    "a result": lambda: (ones(5) * 2).normal_(),
    "a part": lambda: ones(5, 6)[:, ::2].exponential_(),
    "expanded chances": lambda: torch.bernoulli((ones(4, 1) * 0.3).expand(4, 9)),
    "expanded means": lambda: torch.normal(ones(5).expand(3, 5), ones(3, 1).expand(3, 5)),
    "like an expanded tensor": lambda: torch.rand_like(ones(4, 1).expand(4, 3)),
    "float16": lambda: torch.randn(30, dtype=torch.float16, device="cuda"),
    "dropout": lambda: functional.dropout(ones(5000), 0.3),
    "a layer of dropout": lambda: torch.nn.Dropout(0.3)(ones(5000)),
    "dropout in place": lambda: functional.dropout(ones(500), 0.3, inplace=True),
    "dropout of channels": lambda: functional.dropout2d(ones(2, 30, 4, 4), 0.3),
    "alpha dropout": lambda: functional.alpha_dropout(ones(500), 0.3, training=True),
    "gumbel": lambda: functional.gumbel_softmax(ones(50)),
    "a layer": lambda: torch.nn.Linear(6, 5, device="cuda").weight.detach(),
    "a convolution": lambda: torch.nn.Conv2d(2, 3, 3, device="cuda").bias.detach(),  # type: ignore[union-attr]
    "an embedding": lambda: torch.nn.Embedding(9, 5, device="cuda").weight.detach(),
    "xavier": lambda: init.xavier_normal_(ones(5, 6)),
    "truncated": lambda: init.trunc_normal_(ones(50)),
    "checkpoint": lambda: _gradient(
        lambda x: checkpoint(functional.dropout, x, 0.4, use_reentrant=False)
    ),
    "the gradient of dropout": lambda: _gradient(lambda x: functional.dropout(x, 0.4)),
}


def _gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = ones(400).requires_grad_()
    result = function(x)
    result.sum().backward()
    assert x.grad is not None
    return torch.stack([result.detach(), x.grad])


def drawn(call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Return a call's draw from a seed, the next draw, and the states after both."""
    torch.manual_seed(2**40 + 1)
    return [call().cpu(), call().cpu(), torch.cuda.get_rng_state()]


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("where", ["cpu", "mps"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_they_are_those_of_a_simulated_gpu(
    where: str, engine: str, call: Callable[[], torch.Tensor]
) -> None:
    if (
        (where, engine) == ("cpu", "wrap")
        and call is CALLS["checkpoint"]
        and not hasattr(torch.cpu, "get_rng_state")
    ):
        pytest.skip(
            "torch 2.10 and 2.11 look for the state of a checkpoint in torch.cpu (docs/limits.md)"
        )
    with torchdevice.simulate(random="cuda"):
        expected = drawn(call)
    with on(where, engine):
        found = drawn(call)
    for one, other in zip(found, expected, strict=True):
        # Later arithmetic, as of a truncated distribution, may round as the target does.
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("where", ["cpu", "mps"])
def test_the_cpus_numbers_stay_the_cpus(where: str) -> None:
    def numbers() -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.zeros(4)
        return [
            torch.rand(3),
            torch.randn(3, device="cpu"),
            x.normal_(),
            torch.rand(3, generator=torch.Generator()),
        ]

    expected = numbers()
    for engine in ("mode", "wrap"):
        with on(where, engine):
            torch.rand(5, device="cuda")
            assert all(map(torch.equal, numbers(), expected))


@pytest.mark.parametrize("where", ["cpu", "mps"])
def test_a_state_crosses_targets(where: str) -> None:
    with torchdevice.simulate(random="cuda"):
        torch.manual_seed(1)
        torch.randn(300_000, device="cuda")
        state = torch.cuda.get_rng_state()
        expected = torch.randn(50, device="cuda").cpu()
    with on(where, "mode"):
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.randn(50, device="cuda").cpu(), expected)
        generator = pickle.loads(pickle.dumps(torch.Generator("cuda").set_state(state)))
        assert torch.equal(torch.randn(50, device="cuda", generator=generator).cpu(), expected)
        with torch.random.fork_rng(devices=[0]):
            torch.rand(3, device="cuda")
        clone = generator.set_offset(8).clone_state()
        assert (clone.get_offset(), clone.initial_seed()) == (8, 1)


def test_fake_tensors_and_words_for_arguments() -> None:
    with torchdevice.portable("cpu", random="cuda"):
        with FakeTensorMode():
            assert torch.rand(3, device="cuda").shape == torch.randperm(3, device="cuda").shape
        torch.manual_seed(1)
        expected = functional.dropout(ones(50), 0.3)
        torch.manual_seed(1)
        assert torch.equal(torch.dropout(ones(50), p=0.3, train=True), expected)


def test_a_request_is_counted_once() -> None:
    with torchdevice.portable("cpu", random="cuda") as scope:
        for _ in range(3):
            torch.rand(2, device="cuda")
    assert sum(entry.count for entry in scope.journal.entries if entry.requested == "cuda") in (
        3,
        4,
    )


def test_without_the_option_nothing_changes() -> None:
    with torchdevice.portable("cpu", random="cuda"):
        pass
    torch.manual_seed(4)
    expected = torch.rand(3)
    with torchdevice.portable("cpu", random="device"):
        torch.manual_seed(4)
        assert torch.equal(torch.rand(3, device="cuda"), expected)
        assert type(torch.Generator("cuda")) is torch._C.Generator
