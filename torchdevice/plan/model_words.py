"""The words and the name of the program of ``torchdevice plan --model``, made without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

RANK = 16
"""The rank of LoRA's matrices."""

FLAGS = ("batch", "seq", "train", "generate", "dtype", "checkpointing", "strategy")
"""The flags of the program, which are those of the command."""


def of(model: str, given: Any) -> list[str]:
    """Return the program's words for a model and the flags of the command."""
    words = [model]
    for name in FLAGS:
        value = getattr(given, name)
        if value is True:
            words.append(f"--{name}")
        elif value:
            words += [f"--{name}", str(value)]
    return words


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's words. The command has checked them."""
    found = argparse.ArgumentParser("torchdevice plan --model", allow_abbrev=False)
    found.add_argument("model")
    found.add_argument("--batch", type=int, default=1)
    found.add_argument("--seq", type=int, default=2048)
    found.add_argument("--train")
    found.add_argument("--generate", type=int)
    found.add_argument("--dtype")
    found.add_argument("--checkpointing", action="store_true")
    found.add_argument("--strategy")
    return found


def title(words: Sequence[str]) -> str:
    """Describe the program, in a person's words."""
    given = parser().parse_args(words)
    kinds = {
        "full": "full fine-tuning",
        "lora": f"LoRA of rank {RANK}",
        "qlora": f"QLoRA of rank {RANK}",
    }
    size = f"{given.batch} x {given.seq} tokens"
    if given.train:
        kept = ", checkpointed" if given.checkpointing or given.train == "qlora" else ""
        shared = f", {given.strategy.upper()}" if given.strategy else ""
        return f"{given.model}: {kinds[given.train]} with AdamW{kept}{shared}, {size}"
    if given.generate:
        return f"{given.model}: generating {given.generate} tokens after {size}"
    return f"{given.model}: one call without gradients, {size}"
