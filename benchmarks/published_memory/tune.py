"""Llama by torchtune: a full fine-tuning on an A100, and models with adapters as they are loaded.

Source: https://github.com/pytorch/torchtune at commit 1814feb1. Its README has the figure of the
packed dataset of "Optimization flags", two sequences of 4096 tokens in bfloat16. The tutorials on
QLoRA and on the whole workflow have the figures of models. The model, the loss and the steps are
those of ``recipes/full_finetune_single_device.py``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.published_memory.rows import Row

TITLE = "Llama by torchtune"

SOURCE = "[torchtune](https://github.com/pytorch/torchtune/blob/1814feb1/README.md)"

IMPORTS = ("torchao",)
"""What takes long to import."""

VERSIONS: dict[str, str] = {}

_BATCH, _TOKENS = 2, 4096


def _made(checkout: Path, builder: str, **options: Any) -> Any:
    """Return a model of torchtune's in bfloat16."""
    sys.path.insert(0, str(checkout))
    from torchtune import training

    family, _, name = builder.partition(".")
    build = getattr(importlib.import_module(f"torchtune.models.{family}"), name)
    with training.set_default_dtype(torch.bfloat16), torch.device("cuda"):
        return build(**options)


def _adapted(checkout: Path, *, builder: str, **options: Any) -> Callable[[], object]:
    return functools.partial(_made, checkout, builder, **options)


def _tuned(checkout: Path) -> Callable[[], object]:
    model = _made(checkout, "llama3_2.llama3_2_3b")
    from torchtune import training

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    compute_loss = torch.nn.CrossEntropyLoss(ignore_index=-100)
    ignored = torch.full((_BATCH, 1), -100, device="cuda")

    def steps() -> object:
        for _ in range(2):
            tokens = torch.randint(0, 1000, (_BATCH, _TOKENS)).cuda()
            places = torch.arange(_TOKENS).repeat(_BATCH, 1).cuda()
            labels = torch.randint(0, 1000, (_BATCH, _TOKENS)).cuda()
            count = (labels != -100).sum()
            logits = model(tokens=tokens, input_pos=places)
            labels = torch.hstack((labels[..., 1:], ignored)).reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
            loss = compute_loss(logits, labels)
            del logits
            loss = loss * count
            loss.backward()
            training.scale_grads(model, 1 / count)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return model, optimizer, loss

    return steps


_CAUSAL = (
    "The packed dataset: torchtune compiles FlexAttention for it, which needs no mask in memory. The "
    "plan has causal attention, which keeps as much."
)

_OLDER = functools.partial(
    _adapted, builder="llama2.lora_llama2_7b", lora_attn_modules=["q_proj", "v_proj"]
)

_NEWER = functools.partial(
    _adapted,
    builder="llama3_2.lora_llama3_2_3b",
    lora_attn_modules=["q_proj", "v_proj", "output_proj"],
    apply_lora_to_mlp=True,
    lora_rank=64,
    lora_alpha=128,
)

_OF_TUTORIAL = 10**7
"""The bytes by which the older tutorial, which counts gigabytes, rounds its figures."""

_OF_LOG = round(0.01 * 2**30)

ROWS = [
    Row(
        f"Llama 3.2 3B, full, packed dataset, {_BATCH} x {_TOKENS} tokens",
        "A100",
        60 * 2**30,
        round(0.1 * 2**30),
        _tuned,
        (8, 0),
        why=_CAUSAL,
    ),
    Row("Llama 3.2 3B, LoRA, loaded", "not named", round(6.21 * 2**30), _OF_LOG, _NEWER, (8, 0)),
    Row("Llama 2 7B, LoRA, loaded", "not named", 13_960_000_000, _OF_TUTORIAL, _OLDER, (8, 0)),
    Row(
        "Llama 2 7B, LoRA, loaded: reserved",
        "not named",
        13_980_000_000,
        _OF_TUTORIAL,
        _OLDER,
        (8, 0),
        reserved=True,
    ),
]
