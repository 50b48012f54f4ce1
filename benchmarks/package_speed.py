"""What stand-ins for packages cost, against the same mathematics by torch's own operators.

Both run in a scope on the CPU. The functions of torch get their tensors in the layout that they
take, as a program that was written for them would have them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import torchdevice
from benchmarks.measuring import Timing, compare
from benchmarks.progress import track

BY_TORCH = "torch's operators"
BY_STAND_IN = "stand-in"

Pair = tuple[Callable[[], object], Callable[[], object]]
"""A call of torch's operators, and the call of a stand-in that computes the same."""

_HEADS, _SIZE = 4, 32


def _projected(batch: int, rows: int, *, parts: int = 3) -> list[torch.Tensor]:
    """Return tensors (batch, rows, heads, size of a head), as a projection gives them."""
    return [torch.randn(batch, rows, _HEADS, _SIZE, device="cuda") for _ in range(parts)]


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return torch's attention of tensors in the layout of a projection, and in that layout."""
    given = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(*given, is_causal=causal).transpose(1, 2)


def _attention(rows: int, causal: bool = True) -> Callable[[], Pair]:
    def prepare() -> Pair:
        from flash_attn import flash_attn_func

        q, k, v = _projected(2, rows)
        return (lambda: _attended(q, k, v, causal), lambda: flash_attn_func(q, k, v, causal=causal))

    return prepare


def _with_gradients(rows: int) -> Callable[[], Pair]:
    def prepare() -> Pair:
        from flash_attn import flash_attn_func

        leaves = [each.requires_grad_() for each in _projected(2, rows)]

        def by_torch() -> object:
            return torch.autograd.grad(_attended(*leaves, causal=True).sum(), leaves)

        def by_stand_in() -> object:
            return torch.autograd.grad(flash_attn_func(*leaves, causal=True).sum(), leaves)

        return torch.enable_grad()(by_torch), torch.enable_grad()(by_stand_in)

    return prepare


def _sequences(lengths: list[int]) -> Callable[[], Pair]:
    """Attention within sequences of several lengths, against a call for each of them."""

    def prepare() -> Pair:
        from flash_attn import flash_attn_varlen_func

        q, k, v = (each.flatten(0, 1) for each in _projected(1, sum(lengths)))
        starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()

        def by_torch() -> torch.Tensor:
            parts = zip(*(each.split(lengths) for each in (q, k, v)), strict=True)
            outs = [
                functional.scaled_dot_product_attention(
                    *(each.transpose(0, 1)[None] for each in part), is_causal=True
                )
                for part in parts
            ]
            return torch.cat([out[0].transpose(0, 1) for out in outs])

        def by_stand_in() -> Any:
            longest = max(lengths)
            return flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True)

        return by_torch, by_stand_in

    return prepare


def _xformers(rows: int) -> Callable[[], Pair]:
    def prepare() -> Pair:
        from xformers.ops import LowerTriangularMask, memory_efficient_attention

        q, k, v = _projected(2, rows)
        mask = LowerTriangularMask()
        return (
            lambda: _attended(q, k, v, True),
            lambda: memory_efficient_attention(q, k, v, attn_bias=mask),
        )

    return prepare


def _layer_norm(rows: int) -> Callable[[], Pair]:
    def prepare() -> Pair:
        from apex.normalization import FusedLayerNorm

        by_torch, layer = torch.nn.LayerNorm(256).cuda(), FusedLayerNorm(256).cuda()
        x = torch.randn(rows, 256, device="cuda")
        return lambda: by_torch(x), lambda: layer(x)

    return prepare


def _rms_norm(rows: int) -> Callable[[], Pair]:
    def prepare() -> Pair:
        from flash_attn.ops.rms_norm import rms_norm

        weight, x = torch.ones(256, device="cuda"), torch.randn(rows, 256, device="cuda")
        return (
            lambda: functional.rms_norm(x, (256,), weight, 1e-6),
            lambda: rms_norm(x, weight, 1e-6),
        )

    return prepare


def _rotary(rows: int) -> Callable[[], Pair]:
    def prepare() -> Pair:
        from flash_attn.layers.rotary import apply_rotary_emb

        (x,) = _projected(2, rows, parts=1)
        angles = torch.randn(rows, _SIZE // 2, device="cuda")
        cos, sin = angles.cos(), angles.sin()

        def by_torch() -> torch.Tensor:
            wide_cos, wide_sin = (torch.cat([each, each], -1)[:, None] for each in (cos, sin))
            first, second = x.chunk(2, -1)
            return x * wide_cos + torch.cat([-second, first], -1) * wide_sin

        return by_torch, lambda: apply_rotary_emb(x, cos, sin)

    return prepare


def _convolution(length: int) -> Callable[[], Pair]:
    def prepare() -> Pair:
        from causal_conv1d import causal_conv1d_fn

        x, weight = torch.randn(2, 64, length, device="cuda"), torch.randn(64, 4, device="cuda")
        bias = torch.randn(64, device="cuda")

        def by_torch() -> torch.Tensor:
            out = functional.conv1d(x, weight[:, None], bias, padding=3, groups=64)
            return functional.silu(out[..., :length])

        return by_torch, lambda: causal_conv1d_fn(x, weight, bias, activation="silu")

    return prepare


CASES: dict[str, Callable[[], Pair]] = {
    **{f"flash_attn_func, {rows} rows": _attention(rows) for rows in (16, 64, 256, 1024)},
    "flash_attn_func without a mask, 256 rows": _attention(256, causal=False),
    **{
        f"flash_attn_func and its gradients, {rows} rows": _with_gradients(rows)
        for rows in (64, 256)
    },
    "flash_attn_varlen_func, 8 sequences of 16 to 128 rows": _sequences(
        [16, 128, 32, 64, 48, 96, 80, 112]
    ),
    "memory_efficient_attention, 256 rows": _xformers(256),
    "FusedLayerNorm, 512 rows": _layer_norm(512),
    "rms_norm, 512 rows": _rms_norm(512),
    "apply_rotary_emb, 256 rows": _rotary(256),
    "causal_conv1d_fn, 1024 steps": _convolution(1024),
}


def measure(rounds: int, only: str = "") -> dict[str, dict[str, Timing]]:
    """Return the processor times of each case whose name contains ``only``, both ways."""
    chosen = [name for name in CASES if only in name]
    return {name: _timings(CASES[name], rounds) for name in track(chosen, "cases")}


def _timings(prepare: Callable[[], Pair], rounds: int) -> dict[str, Timing]:
    with torchdevice.portable("cpu"):
        torch.manual_seed(0)
        by_torch, by_stand_in = prepare()
        calls = {BY_TORCH: torch.no_grad()(by_torch), BY_STAND_IN: torch.no_grad()(by_stand_in)}
    conditions: dict[str, Any] = dict.fromkeys(calls, lambda: torchdevice.portable("cpu"))
    return compare(conditions, calls, rounds=rounds, seconds=0.05, clock=time.process_time_ns)
