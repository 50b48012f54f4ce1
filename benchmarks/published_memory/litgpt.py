"""LoRA on one A100 by LitGPT, which published the memory that it took.

Source: https://github.com/Lightning-AI/litgpt at commit 0cc02afa, which added
``tutorials/resource-tables.md`` with the figures of "Finetuning with LoRA on 1 GPU" (NVIDIA
A100-SXM4-40GB, torch 2.1, bfloat16); earlier commits normalize Llama's activations in bfloat16. The
model, Fabric and the steps are those of ``finetune/lora.py``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.published_memory.rows import Row

TITLE = "LoRA by LitGPT"

SOURCE = (
    "[LitGPT](https://github.com/Lightning-AI/litgpt/blob/0cc02afa/tutorials/resource-tables.md)"
)

IMPORTS = ("lightning",)
"""What takes long to import."""

VERSIONS: dict[str, str] = {}

_PUBLISHED = [
    ("phi-1_5", 1044, {1: 4.82, 2: 6.76, 4: 10.68}),
    ("stablelm-base-alpha-3b", 1034, {1: 9.69, 2: 12.10, 4: 16.92}),
    ("Llama-2-7b-hf", 1304, {1: 21.30, 2: 29.07, 4: None}),
    ("Llama-2-13b-hf", 1304, {1: 38.12, 2: None, 4: None}),
    ("falcon-40b", 1079, {1: None}),
]
"""Model, tokens of the longest example, and GB by microbatch; None where memory ran out."""

_MEMORY = 42_298_834_944
"""The bytes of an A100 with 40 GB, which its out-of-memory errors report."""


def _tuned(checkout: Path, *, name: str, tokens: int, batch: int) -> Callable[[], object]:
    sys.path.insert(0, str(checkout))
    import lightning
    from lit_gpt.lora import GPT, Config, mark_only_lora_as_trainable
    from lit_gpt.utils import chunked_cross_entropy

    fabric = lightning.Fabric(accelerator="cuda", devices=1, precision="bf16-true")
    fabric.launch()
    with fabric.init_module(empty_init=False):
        model = GPT(
            Config.from_name(name, r=8, alpha=16, dropout=0.05, to_query=True, to_value=True)
        )
    mark_only_lora_as_trainable(model)
    model = fabric.setup_module(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01))
    model.max_seq_length = tokens

    def steps() -> object:
        # The first batch has the longest example. Those after it are drawn at random, and padded to
        # their own longest one.
        for length in (tokens, tokens // 2):
            inputs = torch.randint(0, 1000, (batch, length), device="cuda")
            logits = model(inputs, lm_head_chunk_size=128)
            logits[-1] = logits[-1][..., :-1, :]
            fabric.backward(chunked_cross_entropy(logits, inputs[..., 1:]))
            optimizer.step()
            optimizer.zero_grad()
        return model

    return steps


ROWS = [
    Row(
        f"{name}, LoRA, {batch} x {tokens} tokens",
        "A100 40 GB",
        None if figure is None else round(figure * 1e9),
        10_000_000,
        functools.partial(_tuned, name=name, tokens=tokens, batch=batch),
        (8, 0),
        memory=_MEMORY,
    )
    for name, tokens, figures in _PUBLISHED
    for batch, figure in figures.items()
]
