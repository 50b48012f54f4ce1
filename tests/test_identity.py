"""What a program can read on simulated devices with ``identity="program"``: nothing that says another device type."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import torchdevice
from torchdevice.simulation import autocast

ENGINES = ("mode", "wrap")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- kernels that call operators above autograd ----------------------------------------------------------------------

MACROS = (
    "AT_FORALL_LOWER_PRECISION_FP",
    "AT_FORALL_FP32",
    "AT_FORALL_FP32_SET_OPT_DTYPE",
    "AT_FORALL_PROMOTE",
)

ABOVE_AUTOGRAD = {"scaled_dot_product_attention"}.union(
    name.partition(".")[0] for macro in MACROS for name in autocast.listed(macro)
)
"""Operators whose kernels for the device call others, which save tensors."""


def samples(operator: Any) -> Iterator[Callable[[], Any]]:
    """Yield calls of an operator on the device."""
    for sample in list(operator.sample_inputs("cpu", torch.float32, requires_grad=True))[:3]:

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().to("cuda").requires_grad_(value.requires_grad)

        there = sample.transform(moved)
        yield lambda there=there: operator(there.input, *there.args, **there.kwargs)


def operators_above_autograd() -> list[Any]:
    found = [op for op in op_db if op.aten_name in ABOVE_AUTOGRAD or op.name.split(".")[-1] in ABOVE_AUTOGRAD]
    return [op for op in found if op.supports_autograd and torch.float32 in op.dtypes]


@pytest.mark.parametrize("identity", ["program", "target"])
def test_hooks_on_saved_tensors_see_the_scopes_device(engine: str, identity: str) -> None:
    seen: dict[str, int] = {}
    expected = "cuda:0" if identity == "program" else "simulated:0"

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[str(tensor.device)] = seen.get(str(tensor.device), 0) + 1
        return tensor

    with torchdevice.simulate(engine=engine, identity=identity), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in operators_above_autograd():
            for call in samples(operator):
                for cast in (False, True):
                    with (
                        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                        torch.autocast("cuda", dtype=torch.bfloat16, enabled=cast),
                        contextlib.suppress(RuntimeError),  # dtypes that torch cannot mix under autocast
                    ):
                        call()
    assert seen.keys() == {expected} and seen[expected] > 100


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": lambda: torch.ones(4, 4, dtype=torch.bool, device="cuda").tril()},
    "bias": {"attn_mask": lambda: torch.zeros(4, 4, device="cuda", requires_grad=True)},
    "dropout": {"dropout_p": 0.5},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_recomputed(engine: str, name: str, cast: bool, reentrant: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        options = {key: value() if callable(value) else value for key, value in ATTENTION[name].items()}
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cast):
            return torch.nn.functional.scaled_dot_product_attention(q * 2, k * 2, k, **options).float()

    with torchdevice.simulate(engine=engine):
        found = []
        for way in (lambda q, k: checkpoint(attend, q, k, use_reentrant=reentrant), attend):
            torch.manual_seed(0)
            q = torch.randn(1, 4, 4, 8, device="cuda", requires_grad=True)
            k = torch.randn(1, 2 if name == "grouped" else 4, 4, 8, device="cuda", requires_grad=True)
            way(q, k).sum().backward()
            found.append((q.grad, k.grad))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gpt2_with_gradient_checkpointing(engine: str, reentrant: bool, attention: str) -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=1)
    config._attn_implementation = attention

    def gradients(device: str, checkpointing: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).to(device).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        x = torch.arange(16, device=device).view(2, 8)
        torch.manual_seed(1)
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]

    with torchdevice.simulate(engine=engine), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_it, without = gradients("cuda", True), gradients("cuda", False)
    assert len(with_it) > 20 and all(map(torch.equal, with_it, without))
