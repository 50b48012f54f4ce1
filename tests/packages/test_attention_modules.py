"""flash_attn's layers around attention, against their definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import attention, drawn, same_with_gradients

import torchdevice
from torchdevice.errors import NotSupportedError

pytestmark = pytest.mark.one_engine


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


def parts(layer: Any, x: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values (batch, rows, heads, size) of a layer, by its weights."""
    if layer.cross_attn:
        q, kv = layer.Wq(x), layer.Wkv(other)
    else:
        q, kv = layer.Wqkv(x).tensor_split([x.shape[-1]], -1)
    return [each.unflatten(-1, (-1, layer.head_dim)) for each in (q, *kv.chunk(2, -1))]


LAYERS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"num_heads_kv": 2, "softmax_scale": 0.4},
    {"cross_attn": True},
    {"cross_attn": True, "num_heads_kv": 1},
    {"qkv_proj_bias": False, "out_proj_bias": False, "checkpointing": True},
]
FLASH: list[dict[str, Any]] = [{}, {"window_size": (2, 1)}, {"use_alibi": True}]


@pytest.mark.parametrize("flash", [None, *FLASH], ids=str)
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_attention_with_its_maps(options: dict[str, Any], flash: dict[str, Any] | None) -> None:
    from flash_attn.modules.mha import MHA

    kernels = {} if flash is None else {"use_flash_attn": True, **flash}
    layer = MHA(8, 4, **options, **kernels, dtype=torch.float64)
    x, other = drawn(2, 5, 8), drawn(2, 6, 8)
    source = other if options.get("cross_attn") else x
    out = layer(x, source if options.get("cross_attn") else None)
    slopes = 2.0 ** -(2.0 * torch.arange(1, 5)).double() if kernels.get("use_alibi") else None
    expected, _ = attention(
        *parts(layer, x, source),
        scale=options.get("softmax_scale"),
        causal=options.get("causal", False),
        window=kernels.get("window_size", (-1, -1)),
        slopes=slopes,
    )
    inputs = x, source, *layer.parameters()
    used = inputs if source is other else inputs[1:]
    same_with_gradients(out, layer.out_proj(expected.flatten(2)), used)


@pytest.mark.parametrize("heads", [4, 2])
def test_rotary_embeddings_and_sequences(heads: int) -> None:
    from flash_attn.layers.rotary import apply_rotary_emb
    from flash_attn.modules.mha import MHA

    x = drawn(2, 5, 32)
    layer = MHA(32, 4, heads, causal=True, rotary_emb_dim=4, dtype=torch.float64)
    q, k, v = parts(layer, x, x)
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.01])).double()
    q, k = (apply_rotary_emb(each, angles.cos(), angles.sin()) for each in (q, k))
    expected, _ = attention(q, k, v, causal=True)
    torch.testing.assert_close(layer(x), layer.out_proj(expected.flatten(2)), atol=1e-6, rtol=0)

    layer = MHA(8, 4, heads, use_flash_attn=True, return_residual=True, dtype=torch.float64)
    rows, lengths = drawn(7, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    if heads == 4:
        out, residual = layer(rows, cu_seqlens=lengths, max_seqlen=4)
        apart = [layer(each[None])[0][0] for each in (rows[:3], rows[3:])]
        torch.testing.assert_close(out, torch.cat(apart))
        assert residual is rows


@pytest.mark.parametrize("keys", [5, 3])
def test_triton_s_function_aligns_the_first_row_with_the_first_key(keys: int) -> None:
    from flash_attn.flash_attn_triton import flash_attn_func

    q, k, v, bias = drawn(2, 5, 2, 8), drawn(2, keys, 2, 8), drawn(2, keys, 2, 8), drawn(5, keys)
    hidden = torch.full((5, keys), -torch.inf).triu(1)
    for causal in (False, True):
        whole = (bias + hidden if causal else bias).expand(2, 2, 5, keys)
        expected, _ = attention(q, k, v, bias=whole, scale=0.3)
        found = flash_attn_func(q, k, v, bias, causal, 0.3)
        same_with_gradients(found, expected, (q, k, v, bias))


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_a_mask_keeps(causal: bool) -> None:
    from flash_attn.modules.mha import CrossAttention, SelfAttention

    kept = torch.tensor([4, 2])
    mask = torch.arange(4) < kept[:, None]
    q, kv = drawn(2, 4, 2, 8), drawn(2, 4, 2, 2, 8)
    seen = [attention(q[n : n + 1, :, :], kv[n : n + 1, :kept[n], 0], kv[n : n + 1, :kept[n], 1])
            for n in (0, 1)]  # fmt: skip
    found = CrossAttention()(q, kv, key_padding_mask=mask)
    torch.testing.assert_close(found, torch.cat([out for out, _ in seen]))
    qkv = torch.cat([q[:, :, None], kv], 2)
    torch.testing.assert_close(SelfAttention()(qkv, key_padding_mask=mask), found)
    few = q[:, 2:]
    found = CrossAttention(causal=causal)(few[1:], kv[1:], key_padding_mask=mask[1:])
    expected, _ = attention(few[1:], kv[1:, :2, 0], kv[1:, :2, 1], causal=causal)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("rows", "keys", "kept"), [(5, 3, 3), (4, 5, 2), (3, 3, 0)])
def test_rows_that_see_no_key_weigh_all_equally(rows: int, keys: int, kept: int) -> None:
    from flash_attn.modules.mha import CrossAttention

    q, kv = drawn(1, rows, 2, 8), drawn(1, keys, 2, 2, 8)
    mask = (torch.arange(keys) < kept)[None]
    found = CrossAttention(causal=True)(q, kv, key_padding_mask=mask)
    for row in range(rows):
        seen = row + kept - rows + 1
        if seen > 0:
            given = kv[:, :seen, 0], kv[:, :seen, 1]
            expected = attention(q[:, row : row + 1], *given)[0][0, 0]
        else:
            expected = kv[0, :, 1].mean(0)
        torch.testing.assert_close(found[0, row], expected)


def test_what_the_kernels_in_triton_refuse() -> None:
    from flash_attn.flash_attn_triton import flash_attn_func

    with torchdevice.simulate("a100"):
        q = torch.zeros(1, 4, 2, 64, device="cuda", dtype=torch.float16)
        bias = torch.zeros(1, 2, 4, 4, device="cuda", dtype=torch.float16)
        assert flash_attn_func(q, q, q, bias).shape == q.shape
        with pytest.raises(AssertionError, match="gives a bias no gradient"):
            flash_attn_func(q, q, q, bias.requires_grad_())
        with pytest.raises(AssertionError, match="heads of at most 128, and not of 256"):
            flash_attn_func(*[q.repeat(1, 1, 1, 4)] * 3)
        with pytest.raises(AssertionError, match=r"and not torch\.float32"):
            flash_attn_func(q, q.float(), q)


def test_networks() -> None:
    from flash_attn.modules.mlp import GatedMlp, Mlp

    x = drawn(3, 6)
    mlp = Mlp(6, 5, 4, dtype=torch.float64)
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    expected = hidden @ mlp.fc2.weight.T + mlp.fc2.bias
    same_with_gradients(mlp(x), expected, (x, *mlp.parameters()))
    for activation in (torch.sigmoid, torch.nn.functional.silu, torch.relu):
        gated = GatedMlp(6, 9, activation=activation, multiple_of=4, dtype=torch.float64)
        assert gated.fc1.out_features == 24
        values, gate = (x @ gated.fc1.weight.T + gated.fc1.bias).chunk(2, -1)
        expected = (values * activation(gate)) @ gated.fc2.weight.T + gated.fc2.bias
        same_with_gradients(gated(x), expected, (x, *gated.parameters()))
    assert GatedMlp(6).fc2.in_features == 128 and Mlp(6).fc1.out_features == 24


def test_slopes_of_a_number_of_heads_that_is_no_power_of_2() -> None:
    from flash_attn.modules.mha import MHA

    slopes = MHA(6, 6, use_flash_attn=True, use_alibi=True).inner_attn.alibi_slopes
    torch.testing.assert_close(slopes, 2.0 ** -torch.tensor([2.0, 4.0, 6.0, 8.0, 1.0, 3.0]))


def test_what_is_refused() -> None:
    from flash_attn.models.gpt import GPTLMHeadModel
    from flash_attn.modules.block import Block
    from flash_attn.modules.mha import MHA

    for call, remedy in (
        (lambda: GPTLMHeadModel(None), "transformers library"),
        (lambda: Block(4), "TransformerEncoderLayer"),
        (lambda: MHA(8, 2, dwconv=True), "Leave dwconv out"),
        (lambda: MHA(8, 2)(torch.ones(1, 2, 8), inference_params=object()), "transformers"),
    ):
        with pytest.raises(NotSupportedError, match=remedy):
            call()
    for options in ({"num_heads_kv": 3}, {"use_alibi": True}, {"window_size": (1, 0)}):
        with pytest.raises(AssertionError):
            MHA(8, 4, **options)
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(AssertionError, match="use_flash_attn=False"):
        MHA(8, 4, use_flash_attn=True)(torch.ones(1, 2, 8), key_padding_mask=mask)


def test_a_simulated_gpu_takes_half_precision() -> None:
    with torchdevice.portable(target="simulated:a100"):
        from flash_attn.modules.mha import MHA

        layer = MHA(32, 4, use_flash_attn=True, causal=True, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(1, 5, 32, device="cuda", dtype=torch.bfloat16)
        layer(x).float().square().sum().backward()
        assert layer.Wqkv.weight.grad.isfinite().all()
        with pytest.raises(AssertionError, match="and not"):
            layer.float()(x.float())
