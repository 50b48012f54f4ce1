"""Refusals of the kernels of xformers, causal_conv1d, mamba_ssm, only on simulated GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice

pytestmark = pytest.mark.one_engine


def convolved(**changes: Any) -> torch.Tensor:
    """Call causal_conv1d_fn with inputs that its kernel takes, but for what is changed."""
    from causal_conv1d import causal_conv1d_fn

    width = changes.pop("width", 4)
    channels = changes.pop("channels", 8)
    dtype = changes.pop("dtype", torch.float32)
    device = changes.pop("device", "cuda")
    x = torch.randn(2, 6, channels, device=device).to(dtype)
    x = x.transpose(1, 2) if changes.pop("last", True) else x.transpose(1, 2).contiguous()
    weight = torch.randn(changes.pop("rows", channels), width, device="cuda").to(
        changes.pop("weights", torch.float32)
    )
    return causal_conv1d_fn(x, weight, **changes)


def updated(**changes: Any) -> torch.Tensor:
    from causal_conv1d import causal_conv1d_update

    x = torch.randn(2, 8, device="cuda")
    weight = torch.randn(8, changes.pop("width", 4), device="cuda")
    state = torch.zeros(
        2, 8, changes.pop("kept", 4), device="cuda", dtype=changes.pop("dtype", torch.float32)
    )
    return causal_conv1d_update(x, state, weight, **changes)


def scanned(**changes: Any) -> torch.Tensor:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    size, dtype = changes.pop("size", 4), changes.pop("dtype", torch.float32)
    u = torch.randn(2, 3, 5, device="cuda").to(dtype)
    b = torch.randn(2, size, 5, device="cuda").to(changes.pop("choice", dtype))
    a = -torch.rand(3, size, device="cuda").to(changes.pop("rates", torch.float32))
    return selective_scan_fn(u, changes.pop("delta", u), a, b, b, **changes)


def stepped(**changes: Any) -> torch.Tensor:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    heads, groups = changes.pop("heads", 4), changes.pop("groups", 2)
    x, b = torch.randn(2, heads, 3, device="cuda"), torch.randn(2, groups, 5, device="cuda")
    a = -torch.rand(changes.pop("rates", heads), 3, 5, device="cuda")
    return selective_state_update(torch.zeros(2, heads, 3, 5, device="cuda"), x, x, a, b, b)


def split(**changes: Any) -> torch.Tensor:
    from mamba_ssm import Mamba2

    module = Mamba2(8, d_state=changes["state"], headdim=8).cuda()
    return module(torch.randn(1, 4, 8, device="cuda"))


def attended(**changes: Any) -> torch.Tensor:
    from xformers.ops import memory_efficient_attention

    dtype, size = changes.pop("dtype", torch.float16), changes.pop("size", 8)
    q = torch.randn(2, 4, 2, size, device=changes.pop("device", "cuda")).to(dtype)
    k = changes.pop("k", None)
    k = q if k is None else k.to("cuda")
    return memory_efficient_attention(q, k, changes.pop("v", k), **changes)


HALF = torch.float16

CASES: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (
        convolved,
        {"dtype": torch.float64},
        RuntimeError,
        "Expected input_type == at::ScalarType::Float || input_type ==",
    ),
    (
        convolved,
        {"weights": torch.float64},
        RuntimeError,
        "Expected weight_type == at::ScalarType::Float",
    ),
    (convolved, {"device": "cpu"}, RuntimeError, "Expected x.is_cuda() to be true"),
    (convolved, {"width": 5}, RuntimeError, "causal_conv1d only supports width between 2 and 4"),
    (
        convolved,
        {"channels": 12},
        RuntimeError,
        "only supports channel dimension divisible by 8 for now",
    ),
    (convolved, {"rows": 16}, RuntimeError, "weight must have shape (dim, width)"),
    (
        convolved,
        {"bias": torch.zeros(8, dtype=HALF)},
        RuntimeError,
        "Expected bias.is_cuda() to be true",
    ),
    (
        convolved,
        {"last": False, "seq_idx": torch.zeros(2, 6, dtype=torch.int32)},
        RuntimeError,
        "seq_idx is only supported for channel last layout",
    ),
    (
        convolved,
        {"last": False, "return_final_states": True},
        RuntimeError,
        "final_states is only supported for",
    ),
    (
        convolved,
        {"seq_idx": torch.zeros(2, 6)},
        RuntimeError,
        "Expected seq_idx.scalar_type() == torch::kInt32",
    ),
    (updated, {"width": 5}, RuntimeError, "causal_conv1d only supports width between 2 and 4"),
    (updated, {"kept": 2}, RuntimeError, "Expected conv_state_len >= width - 1"),
    (updated, {"dtype": HALF}, RuntimeError, "Expected conv_state.scalar_type() == input_type"),
    (
        updated,
        {"cache_seqlens": torch.zeros(2)},
        RuntimeError,
        "Expected cache_seqlens.scalar_type() == torch::kInt32",
    ),
    (
        scanned,
        {"dtype": torch.float64},
        RuntimeError,
        "Expected input_type == at::ScalarType::Float",
    ),
    (
        scanned,
        {"rates": HALF},
        RuntimeError,
        "weight_type == at::ScalarType::ComplexFloat to be true",
    ),
    (
        scanned,
        {"choice": HALF},
        RuntimeError,
        "Expected B.scalar_type() == (!is_variable_B ? weight_type : input_type)",
    ),
    (scanned, {"size": 257}, RuntimeError, "selective_scan only supports state dimension <= 256"),
    (
        scanned,
        {"D": torch.ones(3, dtype=HALF)},
        RuntimeError,
        "Expected D.scalar_type() == at::ScalarType::Float",
    ),
    (scanned, {"D": torch.ones(3)}, RuntimeError, "Expected D.is_cuda() to be true"),
    (stepped, {"groups": 3}, AssertionError, "nheads must be divisible by ngroups"),
    (stepped, {"rates": 1}, AssertionError, "state, x, dt, A, B and C have the shapes"),
    (
        split,
        {"state": 2},
        AssertionError,
        "Number of convolution channels is required to be a multiple of 8",
    ),
    (attended, {"dtype": torch.float64}, NotImplementedError, "dtype=torch.float64 (supported:"),
    (attended, {"device": "cpu"}, NotImplementedError, "device=cpu (supported: {'cuda'})"),
    (attended, {"size": 12}, NotImplementedError, "query.shape[-1] % 8 != 0"),
    (
        attended,
        {"k": torch.randn(2, 4, 1, 8, dtype=HALF)},
        ValueError,
        "We don't support broadcasting",
    ),
    (
        attended,
        {"k": torch.randn(2, 4, 2, 8)},
        ValueError,
        "Query/Key/Value should all have the same dtype",
    ),
    (attended, {"p": 1.5}, ValueError, "Invalid dropout probability: p=1.5"),
    (
        attended,
        {"attn_bias": torch.zeros(4, 4, dtype=HALF)},
        ValueError,
        "Invalid shape for attention bias",
    ),
]


@pytest.mark.parametrize(
    ("function", "changes", "kind", "words"),
    CASES,
    ids=[f"{case[0].__name__}-{case[3]}" for case in CASES],
)
def test_a_simulated_gpu_refuses(
    function: Any, changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with torchdevice.simulate("a100"), pytest.raises(kind, match=re.escape(words)):
        function(**changes)


@pytest.mark.parametrize("function", [convolved, updated, scanned, stepped, attended])
def test_a_simulated_gpu_takes_other_inputs(function: Any) -> None:
    with torchdevice.simulate("a100"):
        assert function().is_cuda
        assert split(state=4).is_cuda


@pytest.mark.parametrize("target", ["cpu", "simulated:mps"])
def test_other_targets_take_every_dtype_and_layout(target: str) -> None:
    wide = torch.float32 if target == "simulated:mps" else torch.float64
    with torchdevice.portable(target=target):
        for function, changes in (
            (convolved, {"width": 5, "channels": 12, "weights": HALF}),
            (convolved, {"dtype": wide, "last": False, "return_final_states": True}),
            (updated, {"width": 5}),
            (scanned, {"dtype": wide, "choice": HALF}),
            (split, {"state": 2}),
            (attended, {"dtype": wide, "size": 12}),
        ):
            function(**changes)


def test_an_older_gpu_has_no_bfloat16() -> None:
    with (
        torchdevice.simulate("t4"),
        pytest.raises(NotImplementedError, match="bf16 is only supported on A100"),
    ):
        attended(dtype=torch.bfloat16)


def test_a_chosen_kernel_and_a_bias_of_another_dtype() -> None:
    with torchdevice.portable(target="simulated:a100"):
        from xformers import ops

        q = torch.randn(1, 4, 2, 7, device="cuda", dtype=torch.float16)
        with pytest.raises(NotImplementedError, match="No operator found"):
            ops.memory_efficient_attention(q, q, q)
        chosen = ops.MemoryEfficientAttentionCutlassOp
        with pytest.raises(ValueError, match="Operator `memory_efficient_attention` does not supp"):
            ops.memory_efficient_attention(q, q, q, op=chosen)
        with pytest.raises(ValueError, match="does not support"):
            ops.memory_efficient_attention_forward(q, q, q, op=chosen[0])
        q = torch.randn(1, 4, 2, 8, device="cuda", dtype=torch.float16)
        bias = torch.zeros(1, 2, 4, 4, device="cuda")
        with pytest.raises(RuntimeError, match="invalid dtype for bias"):
            ops.memory_efficient_attention(q, q, q, bias)
        ops.memory_efficient_attention(q, q, q, bias.half(), op=chosen)
