"""Predicted peaks of memory beside those that LitGPT published for real GPUs: a table in Markdown.

``python -m benchmarks.published_memory CHECKOUT``, where CHECKOUT is https://github.com/Lightning-AI/litgpt at commit
0cc02afa, which added ``tutorials/resource-tables.md`` with the figures of "Finetuning with LoRA on 1 GPU" (NVIDIA
A100-SXM4-40GB, torch 2.1, bfloat16); earlier commits normalize Llama's activations in bfloat16. The model, Fabric and
the steps are those of ``finetune/lora.py``. No weights are needed: nothing is computed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import torchdevice

PUBLISHED = [
    ("phi-1_5", 1044, {1: 4.82, 2: 6.76, 4: 10.68}),
    ("stablelm-base-alpha-3b", 1034, {1: 9.69, 2: 12.10, 4: 16.92}),
    ("Llama-2-7b-hf", 1304, {1: 21.30, 2: 29.07, 4: None}),
    ("Llama-2-13b-hf", 1304, {1: 38.12, 2: None, 4: None}),
    ("falcon-40b", 1079, {1: None}),
]
"""Model, tokens of the longest example, and GB by microbatch; None where memory ran out."""


def peak(name: str, tokens: int, batch: int) -> float | None:
    """Return the peak of allocated memory of three steps in GB; None if memory runs out."""
    with torchdevice.simulate("a100", compute="meta", values="assume"):
        try:
            _train(name, tokens, batch)
        except torch.OutOfMemoryError:
            return None
        return torch.cuda.max_memory_allocated() / 1e9


def _train(name: str, tokens: int, batch: int) -> None:
    import lightning
    from lit_gpt.lora import GPT, Config, mark_only_lora_as_trainable
    from lit_gpt.utils import chunked_cross_entropy

    fabric = lightning.Fabric(accelerator="cuda", devices=1, precision="bf16-true")
    fabric.launch()
    with fabric.init_module(empty_init=False):
        model = GPT(Config.from_name(name, r=8, alpha=16, dropout=0.05, to_query=True, to_value=True))
    mark_only_lora_as_trainable(model)
    model = fabric.setup_module(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01))
    model.max_seq_length = tokens
    for _ in range(3):
        inputs = torch.randint(0, 1000, (batch, tokens), device="cuda")
        logits = model(inputs, lm_head_chunk_size=128)
        logits[-1] = logits[-1][..., :-1, :]
        fabric.backward(chunked_cross_entropy(logits, inputs[..., 1:]))
        optimizer.step()
        optimizer.zero_grad()


def _shown(size: Any) -> str:
    return "out of memory" if size is None else f"{size:.2f} GB"


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    print("| model | microbatch | published | predicted | difference |\n|---|---|---|---|---|", flush=True)
    for name, tokens, sizes in PUBLISHED:
        for batch, published in sizes.items():
            predicted = peak(name, tokens, batch)
            difference = f"{predicted / published - 1:+.1%}" if predicted and published else ""
            print(f"| {name} | {batch} | {_shown(published)} | {_shown(predicted)} | {difference} |", flush=True)


if __name__ == "__main__":
    main()
