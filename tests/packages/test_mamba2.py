"""mamba_ssm's Mamba2 against loops of its definition in float64."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import convolution, drawn, same_with_gradients
from torch.nn import functional

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


def duality(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    index: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a state space's output with decays per head, by step, and the last state."""
    batch, length, heads, size = x.shape
    spread = heads // b.shape[2]
    outs, states = [], []
    for n in range(batch):
        for h in range(heads):
            state = x.new_zeros(size, b.shape[3]) if start is None else start[n, h]
            own = []
            for t in range(length):
                fresh = index is not None and int(index[n, t]) != (int(index[n, t - 1]) if t else 0)
                state = torch.zeros_like(state) if fresh else state
                added = torch.outer(x[n, t, h] * dt[n, t, h], b[n, t, h // spread])
                state = torch.exp(dt[n, t, h] * a[h]) * state + added
                own.append(state @ c[n, t, h // spread])
            outs.append(torch.stack(own))
            states.append(state)
    shape = batch, heads
    return torch.stack(outs).reshape(*shape, length, size).transpose(1, 2), torch.stack(
        states
    ).unflatten(0, shape)


INDEX = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [1, 1, 1, 1, 1, 1, 4]], dtype=torch.int32)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("chunk", [2, 3, 16])
@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_scan(chunk: int, sequences: bool, wide: bool, more: bool) -> None:
    """Chunks, sequences in a batch, groups, a start, steps with bias and limits, skip, gate."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x, dt, b, c = drawn(2, 7, 4, 3), drawn(2, 7, 4), drawn(2, 7, 2, 5), drawn(2, 7, 2, 5)
    a = (-torch.rand(4, dtype=torch.float64)).requires_grad_()
    start, bias, z = drawn(2, 4, 3, 5), drawn(4), drawn(2, 7, 4, 3)
    d = drawn(4, 3) if wide else drawn(4)
    index = INDEX if sequences else None
    options: dict[str, Any] = {"seq_idx": index, "return_final_states": True}
    inputs = (x, dt, a, b, c)
    steps = dt
    if more:
        options |= {"D": d, "z": z, "dt_bias": bias, "initial_states": start, "dt_softplus": True}
        options["dt_limit"] = (0.3, 1.5)
        steps = functional.softplus(dt + bias).clamp(0.3, 1.5)
        inputs = (*inputs, d, z, bias, start)
    expected, last = duality(x, steps, a, b, c, index, start if more else None)
    if more:
        expected = (expected + x * (d if wide else d[:, None])) * functional.silu(z)
    out, state = mamba_chunk_scan_combined(x, dt, a, b, c, chunk, **options)
    torch.testing.assert_close(state, last)
    same_with_gradients(out, expected, inputs)


def test_states_of_sequences_in_one_batch() -> None:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x = torch.randn(1, 9, 2, 3).double()
    dt = torch.rand(1, 9, 2).double()
    b = torch.randn(1, 9, 1, 4).double()
    a, bounds = -torch.ones(2).double(), torch.tensor([0, 2, 9], dtype=torch.int32)
    index = torch.tensor([[0] * 2 + [1] * 7], dtype=torch.int32)
    given: dict[str, Any] = {"seq_idx": index, "cu_seqlens": bounds, "return_varlen_states": True}
    out, states = mamba_chunk_scan_combined(x, dt, a, b, b, 4, **given)
    for n, (first, last) in enumerate(((0, 2), (2, 9))):
        expected = duality(*(each[:, first:last] for each in (x, dt)), a, *2 * [b[:, first:last]])
        torch.testing.assert_close((out[:, first:last], states[n : n + 1]), expected)
    with pytest.raises(AssertionError, match="cu_seqlens must be provided"):
        mamba_chunk_scan_combined(x, dt, a, b, b, 4, return_varlen_states=True)
    with pytest.raises(AssertionError, match=r"x, dt, A, B and C have the shapes"):
        mamba_chunk_scan_combined(x, dt[..., :1], a, b, b, 4)


def test_no_overflow_where_states_decay_fast() -> None:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x = torch.ones(1, 200, 1, 1, requires_grad=True)
    one = torch.ones(1, 200, 1, 1)
    out = mamba_chunk_scan_combined(x, one[..., 0] * 5, torch.tensor([-100.0]), one, one, 64)
    torch.testing.assert_close(out, x * 5)
    out.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_what_is_kept_for_gradients_is_linear_in_the_length() -> None:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def kept(length: int) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x, b = torch.randn(1, length, 2, 8, requires_grad=True), torch.randn(1, length, 1, 16)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mamba_chunk_scan_combined(x, torch.rand(1, length, 2), -torch.ones(2), b, b, 64)
        return sum(sizes.values())

    assert kept(2048) < 2.2 * kept(1024)


def test_torch_func_and_compile() -> None:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    x = torch.randn(1, 9, 2, 3).double()
    dt = torch.rand(1, 9, 2).double()
    b = torch.randn(1, 9, 1, 4).double()

    def total(given: torch.Tensor) -> torch.Tensor:
        return mamba_chunk_scan_combined(given, dt, -torch.ones(2).double(), b, b, 4).sum()

    leaf = x.clone().requires_grad_()
    total(leaf).backward()
    torch.testing.assert_close(torch.func.grad(total)(x), leaf.grad)
    torch.testing.assert_close(torch.compile(total, backend="eager", fullgraph=True)(x), total(x))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("is_rms", [False, True])
def test_normalization_with_a_gate(before: bool, grouped: bool, is_rms: bool) -> None:
    from mamba_ssm.ops.triton.layernorm_gated import LayerNorm, RMSNorm, layernorm_fn, rmsnorm_fn

    x, z, weight, bias = drawn(3, 8), drawn(3, 8), drawn(8), drawn(8)
    size = 4 if grouped else 8
    rows = x if before else x * functional.silu(z)
    parts = []
    for part in rows.split(size, -1):
        centred = part if is_rms else part - part.mean(-1, keepdim=True)
        parts.append(centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt())
    expected = torch.cat(parts, -1) * weight + bias
    expected = expected * functional.silu(z) if before else expected
    function = rmsnorm_fn if is_rms else layernorm_fn
    found = function(x, weight, bias, z, 1e-3, size if grouped else None, before)
    same_with_gradients(found, expected, (x, z, weight, bias))
    module = (RMSNorm if is_rms else LayerNorm)(8, 1e-3, size, before, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(weight)
    lacking = expected - (bias * functional.silu(z) if before else bias)
    torch.testing.assert_close(module(x, z), lacking)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"ngroups": 2, "rmsnorm": False, "D_has_hdim": True, "bias": True},
    {"norm_before_gate": True, "conv_bias": False, "dt_limit": (0.01, 0.05), "conv_init": 0.1},
    {"d_ssm": 8, "ngroups": 2},
]


def of_the_paper(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a block, by the published definition."""
    groups, state, heads, size = module.ngroups, module.d_state, module.nheads, module.headdim
    inside = heads * size
    channels = inside + 2 * groups * state
    beside = module.d_inner - inside
    values, linear, z, conv, dt = module.in_proj(x).split(
        [beside, beside, inside, channels, heads], -1
    )
    bias = (
        torch.zeros(channels, dtype=x.dtype) if module.conv1d.bias is None else module.conv1d.bias
    )
    after = functional.silu(
        convolution(conv.transpose(1, 2), module.conv1d.weight[:, 0], bias, None)
    )
    own, b, c = after.transpose(1, 2).split([inside, groups * state, groups * state], -1)
    own = own.unflatten(-1, (heads, size))
    steps = functional.softplus(dt + module.dt_bias).clamp(*module.dt_limit)
    b, c = (each.unflatten(-1, (groups, state)) for each in (b, c))
    y, _ = duality(own, steps, -torch.exp(module.A_log), b, c)
    y = (y + own * module.D.reshape(heads, -1)).flatten(-2)
    gate = functional.silu(z)
    if module.rmsnorm:
        rows = (y if module.norm_before_gate else y * gate).unflatten(-1, (groups, -1))
        y = (rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(
            -2
        ) * module.norm.weight
    y = y * gate if module.norm_before_gate or not module.rmsnorm else y
    return module.out_proj(torch.cat([functional.silu(values) * linear, y], -1))


@pytest.mark.parametrize("options", OPTIONS)
def test_block(options: dict[str, Any]) -> None:
    from mamba_ssm import Mamba2

    torch.manual_seed(0)
    module = Mamba2(8, d_state=4, headdim=4, chunk_size=4, layer_idx=0, **options).double()
    names = {"A_log", "D", "dt_bias", "in_proj.weight", "conv1d.weight", "out_proj.weight"}
    assert (
        names <= module.state_dict().keys()
        and ("norm.weight" in module.state_dict()) == module.rmsnorm
    )
    x = drawn(2, 7, 8)
    expected, found = of_the_paper(module, x), module(x)
    # Rates are in float32, as published.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found.sum().backward()
    assert all(each.grad is not None for each in module.parameters())
    kept: Any = types.SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    with torch.no_grad():
        torch.testing.assert_close(module(x.flatten(0, 1), 7), found.flatten(0, 1))
        module.dt_limit = (0.0, math.inf)  # of which a step knows nothing, as published
        found = module(x)
        parts = [module(x[:, :3], inference_params=kept)]
        for index in range(3, 7):
            kept.seqlen_offset = index
            parts.append(module(x[:, index : index + 1], inference_params=kept))
    torch.testing.assert_close(torch.cat(parts, 1), found, atol=1e-5, rtol=1e-5)


def test_states_of_sequences_begin_a_block() -> None:
    """Two prompts in one batch, and a step of each."""
    from mamba_ssm.modules.mamba2 import Mamba2

    module = Mamba2(8, d_state=4, headdim=4, layer_idx=3)
    x, kept = torch.randn(1, 8, 8), types.SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    index = torch.tensor([[0] * 2 + [1] * 4], dtype=torch.int32)
    with torch.no_grad():
        first = module(x[:, :6], seq_idx=index, cu_seqlens=bounds, inference_params=kept)
        kept.seqlen_offset = 1
        second = module(x[0, 6:, None], inference_params=kept)
        for n, (start, stop) in enumerate(((0, 2), (2, 6))):
            whole = module(torch.cat([x[:, start:stop], x[:, 6 + n : 7 + n]], 1))
            torch.testing.assert_close(
                torch.cat([first[:, start:stop], second[n : n + 1]], 1), whole
            )
    with pytest.raises(torchdevice.errors.NotSupportedError, match="process_group"):
        Mamba2(8, process_group=object())


def test_a_language_model_is_refused_by_name() -> None:
    from mamba_ssm import MambaLMHeadModel

    with pytest.raises(
        torchdevice.errors.NotSupportedError, match=r"mamba_ssm.MambaLMHeadModel.*transformers"
    ):
        MambaLMHeadModel(8)


def test_a_block_on_a_simulated_gpu() -> None:
    with torchdevice.simulate("a100"):
        from mamba_ssm import Mamba2

        module = Mamba2(64, d_state=16, headdim=32, chunk_size=64).cuda().half()
        out = module(torch.randn(1, 70, 64, device="cuda", dtype=torch.float16))
        out.float().sum().backward()
        assert out.is_cuda and out.isfinite().all() and module.in_proj.weight.grad.is_cuda
