"""Selective checkpoints of activations, whose policies name the operators that a GPU runs.

A policy that keeps ``aten._scaled_dot_product_flash_attention`` finds another operator where the
CPU computes for a simulated GPU. It is asked about the operator that the GPU would run, because a
plan would otherwise lack what the policy keeps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint

from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context

STAND_INS: dict[Any, Callable[..., Any]] = {}
"""Operator -> a function that takes its arguments, and returns the operator that it stands for."""


# Both modes, which make a checkpoint, are given the policy up to torch 2.13.
@replaces(checkpoint._CachingTorchDispatchMode, "__init__")
@replaces(checkpoint._CachedTorchDispatchMode, "__init__")
def _make(
    context: Context,
    original: Any,
    mode: Any,
    policy_fn: Callable[..., Any] | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Make a mode whose policy is asked about the device's operators."""
    if policy_fn is None:
        original(mode, None, *args, **kwargs)
        return

    @functools.wraps(policy_fn)
    def asked(of_call: Any, op: Any, *of_op: Any, **options: Any) -> Any:
        if op in STAND_INS:
            op = STAND_INS[op](*of_op, **options)
        return policy_fn(of_call, op, *of_op, **options)

    original(mode, asked, *args, **kwargs)
