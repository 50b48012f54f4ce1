"""``simulate(compute="meta", values="assume")``: value readers finish; lines are reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import FidelityError, NoValueError

READ: dict[str, tuple[Callable[[torch.Tensor], Any], Any]] = {
    "item": (lambda x: x.sum().item(), 0.0),
    "integer": (lambda x: int(x.long().sum()), 0),
    "condition": (lambda x: bool(x.sum() > 0), False),
    "not a number": (lambda x: bool(torch.isnan(x).any() or torch.isinf(x).any()), False),
    "list": (lambda x: x[0].tolist(), [0.0] * 4),
    "NumPy": (lambda x: x.cpu().numpy().sum(), 0),
    "copy": (lambda x: torch.ones(4, 4).copy_(x).sum().item(), 0.0),
    "copy in another dtype": (lambda x: x.to("cpu", torch.int32).dtype, torch.int32),
    "equal": (lambda x: torch.equal(x, x + 1), True),
    "allclose": (lambda x: torch.allclose(x, x + 1), False),
}
"""A call that reads values -> what it reads, which are those of the CPU for zeros."""

SIZED: dict[str, Callable[[torch.Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x),
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 0] > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(return_inverse=True, return_counts=True),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x[0].long(), dim=0),
    "bincount": lambda x: torch.bincount(x[0].long(), minlength=8),
}
"""A call whose result has a size that depends on values."""


@torch.library.custom_op("torchdevice_tests::above_half", mutates_args=(), device_types="cpu")
def above_half(x: torch.Tensor) -> torch.Tensor:
    return (x > 0.5).nonzero()


@above_half.register_fake
def _above_half(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.dim(), dtype=torch.long)


SIZED["operator of a library"] = above_half


def shapes(result: Any) -> Any:
    return [
        (each.shape, each.dtype) for each in (result if isinstance(result, tuple) else [result])
    ]


@pytest.mark.parametrize("name", READ)
def test_values_that_are_read_are_zeros(name: str) -> None:
    read, expected = READ[name]
    with torchdevice.simulate(compute="meta", values="assume") as scope:
        found = read(torch.rand(4, 4, device="cuda"))
        assert type(found) is type(expected) or name == "NumPy"
        assert found == expected
    assumed = [entry for entry in scope.journal.entries if entry.done.startswith("assumed: ")]
    assert assumed and all(entry.site.file == __file__ for entry in assumed)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("name", SIZED)
def test_sizes_are_those_of_ones(name: str) -> None:
    ones = torch.ones(4, 4)
    with torchdevice.simulate(compute="meta", values="assume") as scope:
        before = torch.cuda.memory_allocated()
        found = SIZED[name](torch.rand(4, 4, device="cuda"))
        assert torch.cuda.memory_allocated() > before
        assert all(each.is_cuda for each in (found if isinstance(found, tuple) else [found]))
        assert shapes(found) == shapes(SIZED[name](ones))
        assert any(entry.done == "assumed: all are 1" for entry in scope.journal.entries)


def test_values_that_there_are_count() -> None:
    with torchdevice.simulate(compute="meta", values="assume", count=2) as scope:
        mask = torch.tensor([True, False, True], device="cuda:1")
        x = torch.rand(3, 1 << 20, device="cuda:1", requires_grad=True)
        chosen = x[mask]
        chosen.sum().backward()
        assert mask.sum().item() == 2 and chosen.shape == (2, 1 << 20) and chosen.device.index == 1
        assert x.grad is not None and x.grad.shape == x.shape
        assert not [entry for entry in scope.journal.entries if entry.requested == "item()"]


@pytest.mark.parametrize("combine", [torch.bitwise_and, torch.bitwise_or])
def test_the_condition_that_has_values_decides(combine: Any) -> None:
    with torchdevice.simulate(compute="meta", values="assume"):
        known = torch.tensor([True, False, True]).cuda()
        unknown = torch.rand(2, 3, device="cuda") > 0
        for found in (combine(known, unknown), combine(unknown, known)):
            assert found.tolist() == [[True, False, True]] * 2 and found.is_cuda
        assert combine(unknown, unknown).any().item() is False
        assert (
            combine(known, torch.tensor(True).cuda()).tolist()
            == combine(known.cpu(), torch.tensor(True)).tolist()
        )


@pytest.mark.parametrize("sampled", [True, False])
def test_generation_ends_at_its_length(sampled: bool) -> None:
    """The tokens are unknown, and so is whether one of them ends the text."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=0
    )
    with torchdevice.simulate(compute="meta", values="assume"):
        model = transformers.GPT2LMHeadModel(config).cuda()
        tokens = torch.ones(2, 4, dtype=torch.long, device="cuda")
        written = model.generate(tokens, max_new_tokens=9, do_sample=sampled, pad_token_id=0)
        assert written.shape == (2, 13)


def test_scaled_gradients_are_stepped() -> None:
    """A scaler that finds no infinity steps, so that the optimizer's states are planned."""
    with torchdevice.simulate(compute="meta", values="assume"):
        model = torch.nn.Linear(4, 4).cuda()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.ones(2, 4, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert len(optimizer.state) == 2


D = torch.distributions

DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], D.Distribution]] = {
    "logits": lambda x: D.Categorical(logits=x),
    "probabilities": lambda x: D.Categorical(probs=x.softmax(-1)),
    "normal": lambda x: D.Normal(x, x.exp()),
    "of vectors": lambda x: D.MultivariateNormal(x, torch.eye(4, device="cuda")),
    "positive": lambda x: D.Beta(x.exp(), x.exp()),
    "simplex": lambda x: D.Dirichlet(x.exp()),
    "transformed": lambda x: D.TransformedDistribution(D.Normal(x, x.exp()), [D.TanhTransform()]),
}
"""The probability distributions that a policy of reinforcement learning is made of."""


@pytest.fixture
def validation() -> Iterator[None]:
    """Arguments of distributions are checked, which Dynamo ends for the process."""
    before = D.Distribution._validate_args
    D.Distribution.set_default_validate_args(True)
    yield
    D.Distribution.set_default_validate_args(before)


@pytest.mark.usefixtures("validation")
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_arguments_of_distributions_are_valid(name: str) -> None:
    with torchdevice.simulate(compute="meta", values="assume") as scope:
        policy = DISTRIBUTIONS[name](torch.rand(5, 4, device="cuda"))
        assert policy.log_prob(policy.sample()).shape[0] == 5
        # What the program asks itself is as unknown as before.
        assert not (torch.rand(3, device="cuda") >= 0).all()
    assert {"assumed: the arguments are valid", "assumed: False"} <= {
        row.done for row in scope.report().rows
    }


@pytest.mark.usefixtures("validation")
def test_arguments_of_distributions_that_have_values_are_checked() -> None:
    with (
        torchdevice.simulate(compute="meta", values="assume"),
        pytest.raises(ValueError, match="Expected parameter probs"),
    ):
        D.Bernoulli(probs=torch.tensor([2.0]))


def test_an_operator_of_a_library_says_what_it_needs_where_nothing_is_assumed() -> None:
    with torchdevice.simulate(compute="meta"), pytest.raises(NoValueError, match="above_half"):
        above_half(torch.rand(4, 4, device="cuda"))


def test_what_cannot_be_assumed() -> None:
    with torchdevice.simulate(compute="meta", values="assume"):
        x = torch.rand(4, 4, device="cuda")
        for refused in (
            lambda: x.to_sparse(),
            lambda: torch.nonzero(x, out=torch.empty(0, dtype=torch.long).cuda()),
        ):
            with pytest.raises(NoValueError):
                refused()
    with torchdevice.simulate(compute="meta", values="assume", strict=True):
        with pytest.raises(FidelityError, match="item"):
            torch.rand(4, device="cuda").sum().item()


def test_option_without_the_one_that_it_is_about() -> None:
    message = (
        "values='assume' is about tensors without values. Use it with compute='meta', or leave it "
        "out."
    )
    with pytest.raises(ValueError, match=re.escape(message)), torchdevice.simulate(values="assume"):
        pass
