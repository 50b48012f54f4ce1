"""Selective checkpoints of activations, by policies that name CUDA's attention."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils import checkpoint

import torchdevice

pytestmark = pytest.mark.one_engine

_aten = torch.ops.aten

FLASH = _aten._scaled_dot_product_flash_attention.default

EFFICIENT = _aten._scaled_dot_product_efficient_attention.default

MIB = 1 << 20


def attend(kept: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    """Attend eight times, each within a checkpoint that keeps some operators' results."""
    x = torch.rand(1, 8, 1024, 64, device="cuda", dtype=dtype, requires_grad=True)  # 1 MiB
    contexts = functools.partial(checkpoint.create_selective_checkpoint_contexts, kept)
    y = x
    for _ in range(8):
        y = checkpoint.checkpoint(
            lambda y: torch.nn.functional.scaled_dot_product_attention(y, y, y).sin(),
            y,
            use_reentrant=False,
            context_fn=contexts,
        )
    y.sum().backward()


def needs(kept: Any, dtype: torch.dtype = torch.bfloat16) -> int:
    (device,) = torchdevice.plan(attend, kept, dtype)["devices"]
    return int(device["activations"])


@pytest.mark.usefixtures("no_collections")
def test_a_plan_keeps_the_attention_that_a_gpu_would_run() -> None:
    nothing = needs([])
    assert needs([FLASH]) - nothing > 6 * MIB and needs([EFFICIENT]) == nothing


@pytest.mark.usefixtures("no_collections")
def test_policies_are_asked_for_the_kernel_of_a_gpu() -> None:
    asked = set()

    def policy(call: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        asked.add(op)
        return checkpoint.CheckpointPolicy.MUST_SAVE

    needs(policy)
    assert FLASH in asked and _aten._scaled_dot_product_flash_attention_for_cpu.default not in asked
    needs(policy, torch.float32)
    assert EFFICIENT in asked
