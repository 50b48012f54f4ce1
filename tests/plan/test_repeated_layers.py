"""Layers of a generating model that repeat what another one asked of the allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.plan import models, peaks, repeated_layers

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.one_engine

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
}

CONFIGURATIONS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    # Layers with a sliding window and without alternate.
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=8),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=100),
    "t5": lambda: transformers.T5Config(
        d_model=64, d_kv=16, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=0
    ),
    "mamba": lambda: transformers.MambaConfig(hidden_size=64, num_hidden_layers=4, vocab_size=100),
    # Layers with a state, with attention, and with experts.
    "jamba": lambda: transformers.JambaConfig(**{**SIZES, "num_hidden_layers": 8}, num_experts=2),
}


def generated(
    name: str, repeats: bool, *, batch: int = 1, length: int = 3, tokens: int = 12, memory: str = ""
) -> dict[str, Any]:
    """Return what a plan and the allocator know at the end of a generation."""
    with torchdevice.simulate("cuda", memory=memory or None, compute="meta", values="assume"):
        found = peaks.Peaks()
        found.follow()
        model = models.make(CONFIGURATIONS[name](), torch.bfloat16).eval()
        models.materialized(model, "cuda")
        before = [dict(vars(each)) for each in model.modules()]
        prompt = torch.zeros(batch, length, dtype=torch.long, device="cuda")
        ended = ""
        try:
            with repeated_layers.repeated(model, tokens) if repeats else contextlib.nullcontext():
                model.generate(
                    prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
                )
        except torch.OutOfMemoryError as error:
            ended = str(error)
        peak = found.devices[0]
        assert [dict(vars(each)) for each in model.modules()] == before
        kinds = found.kinds(0)
        found.stop()
        return {
            "ended": ended,
            "ran out": found.ran_out,
            "reserved": peak.reserved,
            "lines": [(each.file, each.line) for each in peak.sites[1:]],
            "kinds": kinds,
            "stats": {k: v for k, v in torch.cuda.memory_stats().items() if "active" not in k},
        }


@pytest.fixture
def repetitions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that were repeated."""
    found: list[Any] = []
    own = repeated_layers._repeated

    def noted(call: Any, *rest: Any) -> Any:
        found.append(call)
        return own(call, *rest)

    monkeypatch.setattr(repeated_layers, "_repeated", noted)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_memory_is_that_of_all_layers(name: str, repetitions: list[Any]) -> None:
    whole = generated(name, False, batch=2)
    assert not repetitions
    assert generated(name, True, batch=2) == whole
    layers, kinds = {"gemma2": (4, 2), "t5": (4, 2), "mamba": (4, 2), "jamba": (8, 3)}.get(
        name, (4, 1)
    )
    assert len(repetitions) == (12 - repeated_layers.WHOLE - 1) * (layers - kinds)


@pytest.mark.parametrize("tokens", [4, 5])
def test_few_tokens(tokens: int, repetitions: list[Any]) -> None:
    assert generated("llama", True, tokens=tokens) == generated("llama", False, tokens=tokens)
    assert len(repetitions) == (3 if tokens == 5 else 0)


def test_memory_that_runs_out_in_a_layer_that_repeats(repetitions: list[Any]) -> None:
    sizes = {"batch": 256, "length": 8, "tokens": 120, "memory": "22MiB"}
    whole = generated("llama", False, **sizes)
    assert whole["ended"] and generated("llama", True, **sizes) == whole and repetitions


def _keeping(layer: Any, x: torch.Tensor) -> None:
    layer.kept = [*getattr(layer, "kept", []), x]


def _asking_for_more(layer: Any, x: torch.Tensor) -> None:
    if layer.weights_of_layer[0] == 2:
        torch.empty(1 << 20, device="cuda")


@pytest.mark.parametrize("does", [_keeping, _asking_for_more])
def test_layers_that_differ_in_what_is_not_seen_of_them_run(
    does: Callable[[Any, torch.Tensor], None],
    repetitions: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    own = mlp.forward
    ran: list[Any] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        ran.append(self)
        does(self, x)
        return own(self, x)

    monkeypatch.setattr(mlp, "forward", forward)
    with torchdevice.simulate("cuda", compute="meta", values="assume"):
        model = models.make(CONFIGURATIONS["llama"](), torch.bfloat16).eval()
        models.materialized(model, "cuda")
        for number, each in enumerate(model.model.layers):
            each.mlp.weights_of_layer = [number]
        prompt = torch.zeros(1, 3, dtype=torch.long, device="cuda")
        found = peaks.Peaks()
        found.follow()
        with repeated_layers.repeated(model, 8):
            model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            assert found.doing() == ", token 8 of 8, 4 of 4 layers run"
        assert not found.doing()
        found.stop()
    assert len(ran) == 4 * 8 and not repetitions
