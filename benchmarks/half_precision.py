"""What half precision costs on a CPU, against float32: products, models that are loaded in it, and autocast.

With the variables ``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`` torch uses no instructions for half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torchdevice
from benchmarks.measuring import Timing, compare
from torchdevice.cli.progress import track

FLOAT32 = "float32"
_DTYPES = {FLOAT32: torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BY_TORCH = ", products by torch"

_TOKENS = 128
_SMALL: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000}


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(intermediate_size=1376, num_key_value_heads=4, **_SMALL)).eval()


def _gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_positions=_TOKENS, **_SMALL)).eval()


def _linear(dtype: torch.dtype) -> Callable[[], object]:
    x, weight = torch.randn(256, 768).to(dtype), torch.randn(768, 768).to(dtype)
    return lambda: torch.nn.functional.linear(x, weight)


def _prefill(make: Callable[[], torch.nn.Module], tokens: int) -> Callable[[torch.dtype], Callable[[], object]]:
    def prepare(dtype: torch.dtype) -> Callable[[], object]:
        model = make().to("cuda", dtype)
        return lambda: model(torch.ones(1, tokens, dtype=torch.long, device="cuda"))

    return prepare


def _autocast_step(dtype: torch.dtype) -> Callable[[], object]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, device="cuda")
    x, optimizer = torch.randn(4, 64, 256, device="cuda"), torch.optim.SGD(layer.parameters(), lr=1e-3)

    def step() -> None:
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            loss = layer(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _training(step: Callable[[torch.dtype], Callable[[], object]]) -> Callable[[torch.dtype], Callable[[], object]]:
    return lambda dtype: torch.enable_grad()(step(dtype))


CASES: dict[str, Callable[[torch.dtype], Callable[[], object]]] = {
    "linear, 256 x 768 by 768 x 768": _linear,
    f"Llama, prefill of {_TOKENS} tokens": _prefill(_llama, _TOKENS),
    f"GPT-2, prefill of {_TOKENS} tokens": _prefill(_gpt2, _TOKENS),
    "Llama, one token": _prefill(_llama, 1),
    "GPT-2, one token": _prefill(_gpt2, 1),
    "training step of a layer, autocast": _training(_autocast_step),
}


def measure(rounds: int, only: str = "") -> dict[str, dict[str, Timing]]:
    """Return, for each case whose name contains ``only``, the times in each dtype, and without this package's help."""
    chosen = [name for name in CASES if only in name]
    return {name: _timings(CASES[name], rounds) for name in track(chosen, "cases")}


def _timings(prepare: Callable[[torch.dtype], Callable[[], object]], rounds: int) -> dict[str, Timing]:
    conditions: dict[str, Any] = {name: lambda: torchdevice.portable("cpu") for name in _DTYPES}
    for name in ("float16", "bfloat16"):
        conditions[name + _BY_TORCH] = lambda: torchdevice.portable("cpu", half_products="target", autocast="bfloat16")
    calls = {}
    for name, condition in conditions.items():
        with condition():
            calls[name] = torch.no_grad()(prepare(_DTYPES[name.removesuffix(_BY_TORCH)]))
    return compare(conditions, calls, rounds=rounds, seconds=0.1)
