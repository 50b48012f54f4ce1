"""xformers.ops against a loop of the definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import attention, drawn, same_with_gradients

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


def of_bias(name: str, rows: int, keys: int) -> tuple[Any, torch.Tensor]:
    """Return a bias of the package, and its documented addition to each row's and key's score."""
    from xformers.ops import LowerTriangularMask, fmha

    biases = fmha.attn_bias
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    place = i + keys - rows
    added = torch.randn(rows, keys, dtype=torch.float64)
    made, seen = {
        "LowerTriangularMask": (LowerTriangularMask(), j <= i),
        "LowerTriangularMaskWithTensorBias": (
            LowerTriangularMask().add_bias(added[None, None]),
            j <= i,
        ),
        "LowerTriangularFromBottomRightMask": (
            biases.LowerTriangularFromBottomRightMask(),
            j <= place,
        ),
        "LowerTriangularFromBottomRightLocalAttentionMask": (
            biases.LowerTriangularFromBottomRightMask().make_local_attention(2),
            (j <= place) & (j > place - 2),
        ),
        "LocalAttentionFromBottomRightMask": (
            biases.LocalAttentionFromBottomRightMask(1, 2),
            (j >= place - 1) & (j <= place + 2),
        ),
    }[name]
    base = added if name.endswith("TensorBias") else torch.zeros_like(added)
    return made, base.masked_fill(~seen, -torch.inf)


BIASES = [
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LocalAttentionFromBottomRightMask",
]


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 6)])
def test_biases(name: str, rows: int, keys: int) -> None:
    from xformers.ops import memory_efficient_attention

    bias, added = of_bias(name, rows, keys)
    q, k, v = drawn(2, rows, 2, 8), drawn(2, keys, 2, 8), drawn(2, keys, 2, 8)
    expected, _ = attention(q, k, v, bias=added.expand(2, 2, rows, keys), scale=0.4)
    same_with_gradients(memory_efficient_attention(q, k, v, bias, scale=0.4), expected, (q, k, v))
    torch.testing.assert_close(
        bias.materialize((2, 2, rows, keys), torch.float64), added.expand(2, 2, rows, keys)
    )


def test_a_tensor_as_bias_has_a_gradient() -> None:
    from xformers.ops import memory_efficient_attention

    q, k, v, bias = drawn(2, 3, 2, 4), drawn(2, 5, 2, 4), drawn(2, 5, 2, 6), drawn(2, 2, 3, 5)
    expected, _ = attention(q, k, v, bias=bias)
    same_with_gradients(memory_efficient_attention(q, k, v, bias), expected, (q, k, v, bias))


def test_shapes_with_one_head_and_with_groups() -> None:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    q, k, v = drawn(3, 4, 2, 3, 8), drawn(3, 4, 2, 3, 8), drawn(3, 4, 2, 3, 8)
    expected, _ = attention(*(each.flatten(2, 3) for each in (q, k, v)), causal=True)
    found = memory_efficient_attention(q, k, v, LowerTriangularMask())
    torch.testing.assert_close(found, expected.unflatten(2, (2, 3)))
    one = memory_efficient_attention(
        q[:, :, 0, 0], k[:, :, 0, 0], v[:, :, 0, 0], LowerTriangularMask()
    )
    torch.testing.assert_close(one, expected[:, :, 0])
    with pytest.raises(ValueError, match="dimensions"):
        memory_efficient_attention(q, k[0], v)
    with pytest.raises(ValueError, match="attn_bias='causal' is neither"):
        memory_efficient_attention(q, k, v, "causal")


@pytest.mark.parametrize(
    "kind", ["BlockDiagonalMask", "make_causal", "make_causal_from_bottomright"]
)
def test_sequences_of_different_lengths(kind: str) -> None:
    from xformers.ops import fmha, memory_efficient_attention

    rows, keys = [2, 3, 1], [4, 3, 2]
    mask = fmha.BlockDiagonalMask.from_seqlens(rows, keys)
    mask = getattr(mask, kind)() if kind.startswith("make") else mask
    q, k, v = drawn(1, 6, 2, 4), drawn(1, 9, 2, 4), drawn(1, 9, 2, 4)
    parts, at_row, at_key = [], 0, 0
    bias = torch.full((6, 9), -torch.inf, dtype=torch.float64)
    for row, key in zip(rows, keys, strict=True):
        i, j = torch.arange(row)[:, None], torch.arange(key)
        seen = {"make_causal": j <= i, "make_causal_from_bottomright": j <= i + key - row}.get(
            kind, j >= 0
        )
        of_sequence = torch.zeros(row, key, dtype=torch.float64).masked_fill(
            ~seen.expand(row, key), -torch.inf
        )
        bias[at_row : at_row + row, at_key : at_key + key] = of_sequence
        given = (
            q[:, at_row : at_row + row],
            k[:, at_key : at_key + key],
            v[:, at_key : at_key + key],
        )
        parts.append(attention(*given, bias=of_sequence.expand(1, 2, row, key))[0])
        at_row, at_key = at_row + row, at_key + key
    same_with_gradients(memory_efficient_attention(q, k, v, mask), torch.cat(parts, 1), (q, k, v))
    torch.testing.assert_close(mask.materialize((6, 9), torch.float64), bias)
    assert [part.shape[1] for part in mask.split(q)] == rows
    with pytest.raises(ValueError, match="Join the sequences in a batch of 1"):
        memory_efficient_attention(q[:, :5], k, v, mask)


def test_sequences_with_windows() -> None:
    from xformers.ops import fmha, memory_efficient_attention

    rows, keys, window = [2, 4, 1], [3, 4, 3], 2
    plain = fmha.BlockDiagonalMask.from_seqlens(rows, keys)
    for mask, from_last in (
        (plain.make_local_attention(window), False),
        (plain.make_local_attention_from_bottomright(window), True),
    ):
        q, k, v = drawn(1, 7, 2, 4), drawn(1, 10, 2, 4), drawn(1, 10, 2, 4)
        bias = torch.full((7, 10), -torch.inf, dtype=torch.float64)
        row, key = 0, 0
        for count, length in zip(rows, keys, strict=True):
            for i in range(count):
                place = i + (length - count if from_last else 0)
                first = max(0, place - window + 1)
                bias[row + i, key + first : key + place + 1] = 0
            row, key = row + count, key + length
        expected, _ = attention(q, k, v, bias=bias.expand(1, 2, 7, 10))
        same_with_gradients(memory_efficient_attention(q, k, v, mask), expected, (q, k, v))
        torch.testing.assert_close(mask.materialize((7, 10), torch.float64), bias)
    with pytest.raises(ValueError, match="not a number of keys"):
        plain.make_local_attention(0)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_with_room_for_keys(causal: bool) -> None:
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha import attn_bias

    kind: Any = attn_bias.BlockDiagonalPaddedKeysMask
    if causal:
        kind = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask
    rows, room, keys = [2, 1], 4, [3, 2]
    mask = kind.from_seqlens(rows, kv_padding=room, kv_seqlen=keys)
    q, k, v = drawn(1, 3, 2, 4), drawn(1, 8, 2, 4), drawn(1, 8, 2, 4)
    bias = torch.full((3, 8), -torch.inf, dtype=torch.float64)
    for row, first, last in ((0, 0, 2 if causal else 3), (1, 0, 3), (2, 4, 6)):
        bias[row, first:last] = 0
    expected, _ = attention(q, k, v, bias=bias.expand(1, 2, 3, 8))
    same_with_gradients(memory_efficient_attention(q, k, v, mask), expected, (q, k, v))
    torch.testing.assert_close(mask.materialize((3, 8), torch.float64), bias)
    with pytest.raises(ValueError, match="does not fit"):
        memory_efficient_attention(q, k[:, :7], v[:, :7], mask)
    with pytest.raises(ValueError, match="has 5 keys, and room for 4"):
        kind.from_seqlens(rows, room, [5, 1])
    with pytest.raises(ValueError, match="1 of keys"):
        kind.from_seqlens(rows, room, [3])
    # The masks that these return have no room.
    others = vars(attn_bias.BlockDiagonalMask)
    makers = {name for name in others if name.startswith(("make_", "from_tensor"))}
    assert len(makers) == 6 and not any(hasattr(mask, name) for name in makers)


def test_queries_and_keys_joined_and_split() -> None:
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    queries, keys = [drawn(1, 3, 1, 4), drawn(2, 1, 1, 4)], [drawn(1, 2, 1, 4), drawn(2, 3, 1, 4)]
    mask, q, k, v = BlockDiagonalMask.from_tensor_lists_qkv(queries, keys, keys)
    assert torch.equal(k, v) and mask.q_seqinfo.seqstart.tolist() == [0, 3, 4, 5]
    assert (mask.k_seqinfo.max_seqlen, mask.k_seqinfo.min_seqlen) == (3, 2)
    for found, given in ((mask.split_queries(q), queries), (mask.split_kv(k), keys)):
        assert all(torch.equal(one, other) for one, other in zip(found, given, strict=True))
    with pytest.raises(ValueError, match=r"sequences of 5 .* do not fit \(1, 8\)"):
        mask.split_queries(k)
    with pytest.raises(ValueError, match="3 rows and 2 keys"):
        mask.make_causal_from_bottomright()
    again = BlockDiagonalMask(q_seqinfo=mask.q_seqinfo, k_seqinfo=mask.k_seqinfo).to("cuda")
    assert torch.equal(again.materialize((5, 8)), mask.materialize((5, 8)))


def test_tensors_joined_and_split() -> None:
    from xformers.ops import fmha

    given = [torch.randn(2, 3, 1, 4), torch.randn(1, 5, 1, 4)]
    mask, joined = fmha.BlockDiagonalMask.from_tensor_list(given)
    assert mask.q_seqlen == [3, 3, 5] and joined.shape == (1, 11, 1, 4)
    torch.testing.assert_close(mask.split(joined), given)


def test_sums_and_results_without_gradients() -> None:
    from xformers.ops import (
        memory_efficient_attention_forward,
        memory_efficient_attention_forward_requires_grad,
    )

    q, k, v = drawn(1, 3, 2, 4), drawn(1, 4, 2, 4), drawn(1, 4, 2, 4)
    expected, sums = attention(q, k, v)
    out, found = memory_efficient_attention_forward_requires_grad(q, k, v)
    torch.testing.assert_close((out, found), (expected.detach(), sums.detach()))
    assert not memory_efficient_attention_forward(q, k, v).requires_grad


@pytest.mark.parametrize("packed", [False, True])
def test_swiglu(packed: bool) -> None:
    from xformers.ops import SwiGLU, swiglu

    module, x = SwiGLU(4, 6, 5, _pack_weights=packed).double(), drawn(2, 4)
    names = (
        {"w12.weight", "w12.bias"} if packed else {"w1.weight", "w1.bias", "w2.weight", "w2.bias"}
    )
    assert module.state_dict().keys() == names | {"w3.weight", "w3.bias"}
    w1, w2 = module.w12.weight.chunk(2) if packed else (module.w1.weight, module.w2.weight)
    b1, b2 = module.w12.bias.chunk(2) if packed else (module.w1.bias, module.w2.bias)
    gate = x @ w1.T + b1
    expected = (gate * torch.sigmoid(gate) * (x @ w2.T + b2)) @ module.w3.weight.T + module.w3.bias
    same_with_gradients(module(x), expected, (x,))
    torch.testing.assert_close(
        swiglu(x, w1, b1, w2, b2, module.w3.weight, module.w3.bias), expected
    )


def test_rows_are_chosen_from_batches_and_added_to_them() -> None:
    from xformers.ops import index_select_cat, scaled_index_add

    one, two = drawn(3, 2), drawn(4, 5)
    found = index_select_cat([one, two], [torch.tensor([2, 0]), torch.tensor([1])])
    expected = torch.stack([one[2, 0], one[2, 1], one[0, 0], one[0, 1], *two[1]])
    same_with_gradients(found, expected, (one, two))

    source, scaling = drawn(2, 2, 3), drawn(3)
    given = torch.zeros(4, 2, 3, dtype=torch.float64)
    found = scaled_index_add(given, torch.tensor([3, 1]), source, scaling, 0.5)
    assert found is given
    rows = [torch.zeros_like(source[0])] * 4
    rows[3], rows[1] = 0.5 * scaling * source[0], 0.5 * scaling * source[1]
    same_with_gradients(found, torch.stack(rows), (source, scaling))


def test_normalizations() -> None:
    from xformers.ops import RMSNorm, rms_norm, rms_norm_add

    x, y, weight = drawn(2, 3, 4), drawn(2, 3, 4), drawn(4)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    same_with_gradients(rms_norm(x, weight, 1e-3), expected * weight, (x, weight))
    layer = RMSNorm(4, include_weight=False, eps=1e-3)
    torch.testing.assert_close(layer(x), expected)
    total = (x + y).detach()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    with torch.no_grad():
        for normalize in (
            lambda a: rms_norm_add(a, y, None, 1e-3),
            lambda a: layer.increment_and_forward_(a, y),
        ):
            given = x.clone()
            torch.testing.assert_close(normalize(given), expected)
            torch.testing.assert_close(given, total)
    with torchdevice.simulate("a100"), pytest.raises(ValueError, match="Gradients not supported"):
        rms_norm(torch.ones(2, device="cuda", requires_grad=True), None)


def test_choices_of_kernels_show_their_dtypes() -> None:
    # diffusers checks a choice with a tensor of the first one.
    with torchdevice.portable(target="cpu"):
        from xformers import ops

        halves = {torch.float16, torch.bfloat16}
        for name, more in (("Cutlass", {torch.float32}), ("FlashAttention", set())):
            for each in getattr(ops, f"MemoryEfficientAttention{name}Op"):
                assert set(each.SUPPORTED_DTYPES) == halves | more
                assert issubclass(each, ops.AttentionOpBase)
