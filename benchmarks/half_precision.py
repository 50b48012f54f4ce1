"""The cost of half precision on a CPU, against float32: products, loaded models and autocast.

With the variables ``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`` torch uses no instructions
for half precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import torchdevice
from benchmarks.measuring import Timing, compare
from benchmarks.progress import track

FLOAT32 = "float32"
_DTYPES = {FLOAT32: torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BY_TORCH = ", products by torch"

_TOKENS = 128
_SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}
_TINY: dict[str, Any] = {**_SMALL, "num_hidden_layers": 2, "hidden_size": 256}


def _llama(size: dict[str, Any] = _SMALL) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(intermediate_size=1376, num_key_value_heads=4, **size)
    ).eval()


def _gpt2(size: dict[str, Any] = _SMALL) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(n_positions=_TOKENS, bos_token_id=0, eos_token_id=0, **size)
    ).eval()


def _linear(dtype: torch.dtype) -> Callable[[], object]:
    x, weight = torch.randn(256, 768).to(dtype), torch.randn(768, 768).to(dtype)
    return lambda: torch.nn.functional.linear(x, weight)


def _prefill(
    make: Callable[[], torch.nn.Module], tokens: int
) -> Callable[[torch.dtype], Callable[[], object]]:
    def prepare(dtype: torch.dtype) -> Callable[[], object]:
        model = make().to("cuda", dtype)
        return lambda: model(torch.ones(1, tokens, dtype=torch.long, device="cuda"))

    return prepare


def _layer() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, device="cuda")
    x = torch.randn(4, 64, 256, device="cuda")
    return layer, lambda: layer(x).float().square().mean()


def _language_model(
    make: Callable[[dict[str, Any]], torch.nn.Module],
) -> Callable[[], tuple[torch.nn.Module, Any]]:
    def prepare() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
        model = make(_TINY).train().cuda()
        tokens = torch.randint(1000, (4, 64), device="cuda")
        return model, lambda: model(tokens, labels=tokens).loss

    return prepare


def _mixed_step(
    make: Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor]]],
) -> Callable[[torch.dtype], Callable[[], object]]:
    """Return a training step as in programs: a scaler in float16, no autocast in float32."""

    def prepare(dtype: torch.dtype) -> Callable[[], object]:
        torch.manual_seed(0)
        model, loss_of = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)

        def step() -> None:
            with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
                loss = loss_of()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return torch.enable_grad()(step)

    return prepare


CASES: dict[str, Callable[[torch.dtype], Callable[[], object]]] = {
    "linear, 256 x 768 by 768 x 768": _linear,
    f"Llama, prefill of {_TOKENS} tokens": _prefill(_llama, _TOKENS),
    f"GPT-2, prefill of {_TOKENS} tokens": _prefill(_gpt2, _TOKENS),
    "Llama, one token": _prefill(_llama, 1),
    "GPT-2, one token": _prefill(_gpt2, 1),
    "training step of a layer, autocast": _mixed_step(_layer),
    "training step of a tiny GPT-2, autocast": _mixed_step(_language_model(_gpt2)),
    "training step of a tiny Llama, autocast": _mixed_step(_language_model(_llama)),
}


def measure(rounds: int, only: str = "") -> dict[str, dict[str, Timing]]:
    """Return times in each dtype for each case named with ``only``, with and without our help."""
    chosen = [name for name in CASES if only in name]
    return {name: _timings(CASES[name], rounds) for name in track(chosen, "cases")}


def _timings(
    prepare: Callable[[torch.dtype], Callable[[], object]], rounds: int
) -> dict[str, Timing]:
    conditions: dict[str, Any] = {name: lambda: torchdevice.portable("cpu") for name in _DTYPES}
    for name in ("float16", "bfloat16"):
        conditions[name + _BY_TORCH] = lambda: torchdevice.portable(
            "cpu", half_products="target", autocast="bfloat16"
        )
    calls = {}
    for name, condition in conditions.items():
        with condition():
            calls[name] = torch.no_grad()(prepare(_DTYPES[name.removesuffix(_BY_TORCH)]))
    return compare(conditions, calls, rounds=rounds, seconds=0.1, clock=time.process_time_ns)
