"""flash_attn's functions against a loop of the definition in float64, forward and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from references import attention, drawn, same_with_gradients

import torchdevice

pytestmark = pytest.mark.one_engine

SHAPES = [(2, 5, 5, 4, 2, 8), (1, 3, 7, 2, 2, 4), (1, 7, 3, 2, 1, 4), (2, 1, 6, 4, 4, 8)]
"""Batch, rows, keys, heads, heads of the keys, head size."""

WINDOWS = [(-1, -1), (2, 1), (0, 0), (-1, 1), (3, -1)]

CASES = [
    {
        "shape": shape,
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "alibi": alibi,
        "scale": scale,
    }
    for shape, causal, window, softcap, alibi, scale in itertools.product(
        SHAPES, (False, True), WINDOWS, (0.0, 2.0), (None, 1, 2), (None, 0.3)
    )
]


@pytest.fixture
def scope() -> Any:
    with torchdevice.portable(target="cpu") as found:
        yield found


def slopes_of(case: dict[str, Any]) -> torch.Tensor | None:
    batch, _, _, heads, _, _ = case["shape"]
    sizes = {None: None, 1: (heads,), 2: (batch, heads)}[case["alibi"]]
    return None if sizes is None else torch.rand(*sizes, dtype=torch.float64)


def given_to(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of a case as flash_attn takes them, and as the reference does."""
    slopes = slopes_of(case)
    theirs = {"softmax_scale": case["scale"], "window_size": case["window"], "alibi_slopes": slopes}
    same = {"causal": case["causal"], "softcap": case["softcap"]}
    return {**theirs, **same}, {
        "scale": case["scale"],
        "window": case["window"],
        "slopes": slopes,
        **same,
    }


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: "-".join(str(each) for each in case.values())
)
class TestDefinition:
    """Each flag, in each combination."""

    def test_of_batches(self, scope: Any, case: dict[str, Any]) -> None:
        from flash_attn import flash_attn_func, flash_attn_kvpacked_func

        batch, rows, keys, heads, fewer, size = case["shape"]
        q = drawn(batch, rows, heads, size)
        k = drawn(batch, keys, fewer, size)
        v = drawn(batch, keys, fewer, size)
        flags, of_reference = given_to(case)
        expected, sums = attention(q, k, v, **of_reference)
        same_with_gradients(flash_attn_func(q, k, v, **flags), expected, (q, k, v))
        packed = flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **flags)
        torch.testing.assert_close(packed, expected)
        out, found, weights = flash_attn_func(q, k, v, return_attn_probs=True, **flags)
        torch.testing.assert_close((out, found), (expected, sums.detach()))
        assert not found.requires_grad and weights.shape == (batch, heads, rows, keys)
        spread = v.repeat_interleave(heads // fewer, 2)
        torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, spread), expected)

    def test_of_sequences_of_different_lengths(self, scope: Any, case: dict[str, Any]) -> None:
        from flash_attn import flash_attn_varlen_func

        _, rows, keys, heads, fewer, size = case["shape"]
        lengths = [(rows, keys), (1, 2), (0, 3), (keys, rows), (2, 0)]
        q, k, v = (
            drawn(sum(each[kind] for each in lengths), count, size)
            for kind, count in ((0, heads), (1, fewer), (1, fewer))
        )
        bounds = [
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32)
            for each in zip(*lengths, strict=True)
        ]
        flags, of_reference = given_to(case | {"alibi": case["alibi"] and 1})
        parts = [
            attention(
                *(each[None, a:b] for each, (a, b) in zip((q, k, v), places, strict=True)),
                **of_reference,
            )
            for places in (
                ((bounds[0][n], bounds[0][n + 1]), *2 * [(bounds[1][n], bounds[1][n + 1])])
                for n in (0, 1, 3, 4)
            )
        ]
        expected = torch.cat([out[0] for out, _ in parts])
        out = flash_attn_varlen_func(q, k, v, *bounds, max(rows, keys), max(rows, keys), **flags)
        same_with_gradients(out, expected, (q, k, v))
        _, sums, _ = flash_attn_varlen_func(q, k, v, *bounds, 9, 9, return_attn_probs=True, **flags)
        torch.testing.assert_close(sums, torch.cat([each[0] for _, each in parts], 1).detach())


def test_packed_queries_keys_and_values(scope: Any) -> None:
    from flash_attn import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func

    qkv = drawn(2, 5, 3, 4, 8)
    expected, _ = attention(*qkv.unbind(2), causal=True)
    same_with_gradients(flash_attn_qkvpacked_func(qkv, causal=True), expected, (qkv,))
    bounds = torch.tensor([0, 5, 10], dtype=torch.int32)
    found = flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), bounds, 5, causal=True)
    torch.testing.assert_close(found, expected.flatten(0, 1))


def test_equally_long_sequences_have_sums_in_order(scope: Any) -> None:
    from flash_attn import flash_attn_varlen_kvpacked_func

    q, kv = drawn(6, 2, 4), drawn(6, 2, 2, 4)
    bounds = torch.tensor([0, 3, 6], dtype=torch.int32)
    out, sums, _ = flash_attn_varlen_kvpacked_func(
        q, kv, bounds, bounds, 3, 3, return_attn_probs=True
    )
    parts = [
        attention(q[None, a : a + 3], kv[None, a : a + 3, 0], kv[None, a : a + 3, 1])
        for a in (0, 3)
    ]
    torch.testing.assert_close(out, torch.cat([each[0] for each, _ in parts]))
    torch.testing.assert_close(sums, torch.cat([each[0] for _, each in parts], 1).detach())


def test_long_rows_are_computed_in_blocks(scope: Any) -> None:
    """A window over more rows than one block has, and scores of more than one block."""
    from flash_attn import flash_attn_func

    q, k, v = (torch.randn(1, 2500, 1, 4, dtype=torch.float64) for _ in range(3))
    near = torch.arange(2500)[:, None] - torch.arange(2500)
    mask = (near >= 0) & (near <= 40)
    scores = (q[0, :, 0] @ k[0, :, 0].T / 2).masked_fill(~mask, -torch.inf)
    found = flash_attn_func(q, k, v, causal=True, window_size=(40, 0))
    torch.testing.assert_close(found[0, :, 0], scores.softmax(-1) @ v[0, :, 0])
    both = flash_attn_func(q, k, v, causal=True, window_size=(40, 0), return_attn_probs=True)
    torch.testing.assert_close(both[0], found)
    torch.testing.assert_close(both[1][0, 0], scores.logsumexp(-1))
    torch.testing.assert_close(both[2][0, 0], scores.softmax(-1))


def test_dropout_leaves_weights_out_and_says_which(scope: Any) -> None:
    from flash_attn import flash_attn_func

    q, k, v = (torch.randn(2, 40, 2, 8, dtype=torch.float64) for _ in range(3))
    torch.manual_seed(1)
    out, _, weights = flash_attn_func(q, k, v, dropout_p=0.25, return_attn_probs=True)
    left_out = weights < 0
    assert 0.2 < left_out.double().mean() < 0.3
    kept = weights.masked_fill(left_out, 0) / 0.75
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, v), out)
    mean = torch.stack([flash_attn_func(q, k, v, dropout_p=0.25) for _ in range(300)]).mean(0)
    assert (mean - flash_attn_func(q, k, v)).abs().max() < 0.15
    with pytest.raises(RuntimeError, match=r"dropout_p=1.0 is not a probability below 1"):
        flash_attn_func(q, k, v, 1.0)


def test_a_strict_scope_refuses_other_random_numbers() -> None:
    with torchdevice.portable(target="cpu", strict=True):
        from flash_attn import flash_attn_func

        q = torch.randn(1, 4, 1, 8)
        flash_attn_func(q, q, q)
        with pytest.raises(torchdevice.errors.FidelityError, match="dropout"):
            flash_attn_func(q, q, q, 0.5)


class TestCache:
    """``flash_attn_with_kvcache``."""

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_new_keys_are_rotated_written_and_seen(
        self, scope: Any, causal: bool, interleaved: bool
    ) -> None:
        from flash_attn import flash_attn_with_kvcache

        torch.manual_seed(0)
        # Keys and values of three sequences.
        cache = torch.randn(2, 3, 8, 2, 6, dtype=torch.float64)
        before = cache.clone()
        q, k, v = (torch.randn(2, 2, heads, 6, dtype=torch.float64) for heads in (4, 2, 2))
        angles = torch.outer(
            torch.arange(8, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64)
        )
        lengths = torch.tensor([3, 5], dtype=torch.int32)
        rows = torch.tensor([2, 0], dtype=torch.int32)
        out, sums = flash_attn_with_kvcache(
            q, cache[0], cache[1], k, v, angles.cos(), angles.sin(), lengths, rows, causal=causal,
            rotary_interleaved=interleaved, return_softmax_lse=True,
        )  # fmt: skip
        for index, (length, row) in enumerate(((3, 2), (5, 0))):
            turned_k = torch.stack(
                [turned(k[index, n], angles[length + n], interleaved) for n in range(2)]
            )
            turned_q = torch.stack(
                [turned(q[index, n], angles[length + n * causal], interleaved) for n in range(2)]
            )
            before[:, row, length : length + 2] = torch.stack((turned_k, v[index]))
            seen = before[:, row, : length + 2]
            expected = attention(turned_q[None], seen[0][None], seen[1][None], causal=causal)
            torch.testing.assert_close((out[index], sums[index]), (expected[0][0], expected[1][0]))
        torch.testing.assert_close(cache, before)

    def test_pages(self, scope: Any) -> None:
        from flash_attn import flash_attn_with_kvcache

        pages = torch.randn(2, 5, 4, 1, 8, dtype=torch.float64)
        table = torch.tensor([[4, 1, 0], [2, 3, 0]], dtype=torch.int32)
        q = torch.randn(2, 1, 2, 8, dtype=torch.float64)
        new = torch.randn(2, 2, 1, 1, 8, dtype=torch.float64)
        lengths = torch.tensor([7, 2], dtype=torch.int32)
        out = flash_attn_with_kvcache(
            q,
            pages[0],
            pages[1],
            new[0],
            new[1],
            cache_seqlens=lengths,
            block_table=table,
            causal=True,
        )
        for index, length in enumerate((7, 2)):
            seen = pages[:, table[index].long()].flatten(1, 2)[:, : length + 1]
            torch.testing.assert_close(seen[:, length], new[:, index, 0])
            torch.testing.assert_close(
                out[index], attention(q[index][None], seen[0][None], seen[1][None])[0][0]
            )

    def test_keys_that_do_not_count_at_the_beginning(self, scope: Any) -> None:
        from flash_attn import flash_attn_with_kvcache

        q, k, v = (torch.randn(1, size, 2, 4, dtype=torch.float64) for size in (2, 6, 6))
        found = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=5, cache_leftpad=torch.tensor([2]), causal=True
        )
        torch.testing.assert_close(found, attention(q, k[:, 2:5], v[:, 2:5], causal=True)[0])

    def test_a_full_cache_is_an_error(self, scope: Any) -> None:
        from flash_attn import flash_attn_with_kvcache

        q = torch.randn(1, 1, 2, 4)
        with pytest.raises(RuntimeError, match="1 new keys after 3 do not fit in a cache of 3"):
            flash_attn_with_kvcache(
                q, q.expand(1, 3, 2, 4), q.expand(1, 3, 2, 4), q, q, cache_seqlens=3
            )


def turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of each head (heads, size) by angles, one pair after the other."""
    found = x.clone()
    for pair, angle in enumerate(angles):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + len(angles))
        found[:, a] = x[:, a] * angle.cos() - x[:, b] * angle.sin()
        found[:, b] = x[:, a] * angle.sin() + x[:, b] * angle.cos()
    return found


ROTATED = {
    "whole": (2, 4, 3, 6),
    "qkv": (2, 4, 3, 2, 6),
    "qkv, fewer heads": (2, 4, 6, 6),
    "kv": (2, 4, 2, 3, 6),
}
"""What is rotated in place -> its shape."""


def rotated_in_place(
    name: str,
    x: torch.Tensor,
    copied: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x, which is rotated in place, and what becomes of its copy part by part."""
    from flash_attn.layers import rotary

    if name == "whole":
        found = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace=True)
        return found, rotary.apply_rotary_emb(copied, cos, sin, interleaved)
    if name == "kv":
        keys, values = copied.unbind(2)
        found = rotary.apply_rotary_emb_kv_(x, cos, sin, interleaved)
        return found, torch.stack((rotary.apply_rotary_emb(keys, cos, sin, interleaved), values), 2)
    heads = 4 if name == "qkv, fewer heads" else None
    parts = copied.unbind(2) if heads is None else copied.split([4, 1, 1], 2)
    q, k = (rotary.apply_rotary_emb(part, cos, sin, interleaved) for part in parts[:2])
    found = rotary.apply_rotary_emb_qkv_(x, cos, sin, interleaved=interleaved, num_heads_q=heads)
    return found, (torch.stack if heads is None else torch.cat)((q, k, parts[2]), 2)


class TestRotary:
    """``flash_attn.layers.rotary``."""

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("offsets", [0, 3, (1, 4)])
    def test_definition(self, scope: Any, interleaved: bool, offsets: Any) -> None:
        from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_func

        assert apply_rotary_emb is apply_rotary_emb_func
        x, angles = drawn(2, 3, 2, 6), torch.rand(8, 2, dtype=torch.float64)
        starts = offsets if isinstance(offsets, tuple) else (offsets, offsets)
        rows = [
            torch.stack([turned(x[b, n], angles[starts[b] + n], interleaved) for n in range(3)])
            for b in range(2)
        ]
        given = torch.tensor(offsets) if isinstance(offsets, tuple) else offsets
        found = apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=given)
        same_with_gradients(found, torch.stack(rows), (x,))
        flat, bounds = x.detach()[0], torch.tensor([0, 1, 3], dtype=torch.int32)
        expected = torch.stack(
            [turned(flat[n], angles[starts[n > 0] + max(0, n - 1)], interleaved) for n in range(3)]
        )
        found = apply_rotary_emb(
            flat, angles.cos(), angles.sin(), interleaved, True, given, bounds, 2
        )
        assert found.data_ptr() == flat.data_ptr()
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("target", ["cpu", "simulated:a100"])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("name", ROTATED)
    def test_in_place_of_a_tensor_that_wants_a_gradient(
        self, name: str, interleaved: bool, target: str
    ) -> None:
        with torchdevice.portable(target=target):
            angles = torch.rand(8, 2, device="cuda")
            leaf = torch.randn(ROTATED[name], device="cuda", requires_grad=True)
            copied = leaf.detach().clone().requires_grad_()
            found, expected = rotated_in_place(
                name, leaf, copied, angles.cos(), angles.sin(), interleaved
            )
            torch.testing.assert_close(found, expected)
            assert torch.equal(leaf, found)  # which was written to
            weights = torch.randn_like(found)
            kept = weights.clone()
            found.backward(weights)
            expected.backward(kept)
            torch.testing.assert_close(leaf.grad, copied.grad)
            assert torch.equal(weights, kept)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_the_kernel_has_no_gradient_and_rotates_back(
        self, scope: Any, interleaved: bool
    ) -> None:
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn.ops.triton.rotary import apply_rotary

        x, angles = drawn(4, 2, 6), torch.rand(8, 2, dtype=torch.float64)
        tables, bounds = (angles.cos(), angles.sin()), torch.tensor([0, 1, 4], dtype=torch.int32)
        found = apply_rotary(x, *tables, 2, bounds, 3, interleaved)
        assert not found.requires_grad
        torch.testing.assert_close(
            found, apply_rotary_emb(x, *tables, interleaved, False, 2, bounds, 3).detach()
        )
        assert (
            apply_rotary(found, *tables, 2, bounds, 3, interleaved, inplace=True, conjugate=True)
            is found
        )
        torch.testing.assert_close(found, x.detach())

    def test_module_rotates_queries_and_keys_in_place(self, scope: Any) -> None:
        from flash_attn.layers.rotary import RotaryEmbedding

        module = RotaryEmbedding(4, base=100.0)
        qkv = torch.randn(1, 5, 3, 2, 6, dtype=torch.float64)
        before = qkv.clone()
        assert module(qkv, seqlen_offset=2).data_ptr() == qkv.data_ptr() and not module.state_dict()
        for n in range(5):
            angles = torch.tensor([n + 2.0, (n + 2.0) * 100.0**-0.5], dtype=torch.float64)
            for part in (0, 1):
                torch.testing.assert_close(
                    qkv[0, n, part], turned(before[0, n, part], angles, False), atol=1e-6, rtol=0
                )
        torch.testing.assert_close(qkv[:, :, 2], before[:, :, 2])
        q, kv = module(before[:, :, 0].clone(), before[:, :, 1:].clone(), seqlen_offset=2)
        torch.testing.assert_close((q, kv), (qkv[:, :, 0], qkv[:, :, 1:]))
        with pytest.raises(torchdevice.errors.NotSupportedError, match="scale_base"):
            RotaryEmbedding(4, scale_base=512)

    def test_a_module_that_was_used_in_inference_mode_trains(self, scope: Any) -> None:
        from flash_attn.layers.rotary import RotaryEmbedding

        module, given = RotaryEmbedding(4), drawn(1, 5, 3, 2, 6)
        with torch.inference_mode():
            expected = module(given.clone())
        found = module(given.clone())
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(found.square().sum(), given)
        torch.testing.assert_close(gradient, 2 * given.detach())  # rotations keep lengths


class TestNormalization:
    """``flash_attn.ops``: each against the formula."""

    @pytest.mark.parametrize("is_rms", [False, True])
    @pytest.mark.parametrize("prenorm", [False, True])
    def test_sum_with_a_residual(self, scope: Any, is_rms: bool, prenorm: bool) -> None:
        from flash_attn.ops.layer_norm import dropout_add_layer_norm
        from flash_attn.ops.rms_norm import dropout_add_rms_norm
        from flash_attn.ops.triton.layer_norm import layer_norm_fn

        x, residual, weight, bias = drawn(3, 8), drawn(3, 8), drawn(8), drawn(8)
        total = x + residual
        centred = total if is_rms else total - total.mean(-1, keepdim=True)
        expected = centred / ((centred**2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias
        function = dropout_add_rms_norm if is_rms else dropout_add_layer_norm
        for found in (
            function(x, residual, weight, bias, 0.0, 1e-3, prenorm=prenorm),
            layer_norm_fn(x, weight, bias, residual, eps=1e-3, prenorm=prenorm, is_rms_norm=is_rms),
        ):
            if prenorm:
                torch.testing.assert_close(found[1], total)
            same_with_gradients(
                found[0] if prenorm else found, expected, (x, residual, weight, bias)
            )

    @pytest.mark.parametrize("is_rms", [False, True])
    def test_sum_of_two_branches(self, scope: Any, is_rms: bool) -> None:
        from flash_attn.ops import layer_norm, rms_norm

        function = (
            rms_norm.dropout_add_rms_norm_parallel_residual
            if is_rms
            else layer_norm.dropout_add_layer_norm_parallel_residual
        )
        x0, x1, residual, *affine = given = [drawn(3, 8) for _ in range(3)] + [
            drawn(8) for _ in range(4)
        ]
        total = x0 + x1 + residual
        rows = total if is_rms else total - total.mean(-1, keepdim=True)
        rows = rows / ((rows**2).mean(-1, keepdim=True) + 1e-3).sqrt()
        expected = torch.stack([rows * affine[0] + affine[1], rows * affine[2] + affine[3]])
        *norms, found, kept0, kept1 = function(
            *given, 0.0, 1e-3, prenorm=True, return_dropout_mask=True
        )
        torch.testing.assert_close(found, total)
        assert kept0.dtype is torch.uint8 and bool(kept0.all()) and bool(kept1.all())
        same_with_gradients(torch.stack(norms), expected, given)
        alone, nothing = function(x0, None, None, *affine[:2], None, None, 0.0, 1e-3)
        plain = function(x0, torch.zeros_like(x0), None, *affine, 0.0, 1e-3)
        assert nothing is None
        torch.testing.assert_close(alone, plain[0])

    @pytest.mark.parametrize("is_rms", [False, True])
    def test_sum_of_a_part_of_the_rows(self, scope: Any, is_rms: bool) -> None:
        from flash_attn.ops import layer_norm, rms_norm

        function = (
            rms_norm.dropout_add_rms_norm_subset
            if is_rms
            else layer_norm.dropout_add_layer_norm_subset
        )
        x0, residual, weight, bias, scale = given = (
            drawn(2, 2, 8),
            drawn(3, 2, 8),
            drawn(8),
            drawn(8),
            drawn(8),
        )
        # Of three sequences x0 has the first and the third, and the result the second and third.
        places = {
            "x0_subset": torch.tensor([[1, 2], [0, 0], [3, 4]], dtype=torch.int32),
            "out_subset": torch.tensor([[0, 0], [1, 2], [3, 4]], dtype=torch.int32),
        }
        total = torch.cat([2 * scale * x0[:1], torch.zeros(1, 2, 8), 2 * scale * x0[1:]]) + residual
        rows = total if is_rms else total - total.mean(-1, keepdim=True)
        rows = rows / ((rows**2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias
        more = {"layerscale": scale, "rowscale_const": 2.0, "out_numrows": 4, **places}
        found, found_total = function(x0, residual, weight, bias, 0.0, 1e-3, prenorm=True, **more)
        torch.testing.assert_close(found_total, total)
        same_with_gradients(found, rows[1:], given)
        out, kept = function(
            x0, residual, weight, bias, 0.5, 1e-3, return_dropout_mask=True, **more
        )
        assert out.shape == found.shape and kept.shape == x0.shape

    def test_modules_and_kinds_of_results(self, scope: Any) -> None:
        from flash_attn.ops.rms_norm import DropoutAddRMSNorm, RMSNorm, rms_norm
        from flash_attn.ops.triton.layer_norm import RMSNorm as OfTriton

        x = torch.randn(2, 8, dtype=torch.bfloat16)
        found = RMSNorm(8, dtype=torch.float32)(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(
            found, torch.nn.functional.rms_norm(x.float(), (8,), eps=1e-5).to(x.dtype)
        )
        torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-5), found)
        torch.testing.assert_close(OfTriton(8)(x), found)
        module = DropoutAddRMSNorm(8, prenorm=True, residual_in_fp32=True, p=0.5).eval()
        out, total = module(x)
        assert total.dtype == torch.float32 and out.dtype == torch.bfloat16


def test_padding(scope: Any) -> None:
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    x, mask = drawn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    tokens, places, bounds, longest, used = unpad_input(x, mask)
    assert places.tolist() == [0, 1, 5, 6, 7] and bounds.tolist() == [0, 2, 5] and longest == 3
    assert used.tolist() == [2, 3] and bounds.dtype == used.dtype == torch.int32
    assert torch.equal(tokens, index_first_axis(x.flatten(0, 1), places))
    padded = pad_input(tokens, places, 2, 4)
    same_with_gradients(padded, x * mask[..., None], (x,))


class TestRefusals:
    """What the package's kernels refuse is refused on simulated GPUs only."""

    def test_a_cpu_takes_every_dtype_size_and_layout(self, scope: Any) -> None:
        from flash_attn import flash_attn_func

        q = torch.randn(1, 264, 2, 3).transpose(1, 3)
        assert flash_attn_func(q, q, q).shape == q.shape

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": torch.float32}, "FlashAttention only support fp16 and bf16 data type"),
            ({"size": 264}, "FlashAttention forward only supports head dimension at most 256"),
            ({"device": "cpu"}, "q must be on CUDA"),
            (
                {"flags": {"softcap": 1.0, "dropout_p": 0.5}},
                "Softcapping does not support dropout for now",
            ),
        ],
    )
    def test_a_simulated_gpu_refuses(self, options: dict[str, Any], message: str) -> None:
        with torchdevice.simulate("cuda"):
            from flash_attn import flash_attn_func

            place = {
                "dtype": options.get("dtype", torch.float16),
                "device": options.get("device", "cuda"),
            }
            q = torch.randn(1, 4, 2, options.get("size", 8), **place)
            with pytest.raises(RuntimeError, match=message):
                flash_attn_func(q, q, q, **options.get("flags", {}))

    def test_only_a_cache_has_to_be_contiguous(self) -> None:
        """The package copies other tensors by itself, and makes heads a multiple of 8."""
        with torchdevice.simulate("cuda"):
            from flash_attn import flash_attn_func, flash_attn_with_kvcache

            q = torch.randn(1, 12, 2, 4, dtype=torch.float16, device="cuda").transpose(1, 3)
            assert flash_attn_func(q, q, q).shape == q.shape
            with pytest.raises(AssertionError, match="k_cache must have contiguous last dimension"):
                flash_attn_with_kvcache(q, q, q)
            with pytest.raises(AssertionError, match="v_cache must have contiguous last dimension"):
                flash_attn_with_kvcache(q, q.contiguous(), q)

    def test_a_gpu_before_ampere_is_refused(self) -> None:
        with torchdevice.simulate("t4"):
            from flash_attn import flash_attn_func

            q = torch.randn(1, 4, 2, 8, dtype=torch.float16, device="cuda")
            with pytest.raises(
                RuntimeError, match="FlashAttention only supports Ampere GPUs or newer"
            ):
                flash_attn_func(q, q, q)

    def test_shapes_and_dtypes_that_do_not_fit(self, scope: Any) -> None:
        from flash_attn import flash_attn_func

        q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 2, 8)
        with pytest.raises(RuntimeError, match="q has 3 heads and k has 2"):
            flash_attn_func(q, k, k)
        with pytest.raises(RuntimeError, match="do not fit"):
            flash_attn_func(q, q[..., :4], q)
        with pytest.raises(RuntimeError, match="Use one dtype"):
            flash_attn_func(q, q.double(), q.double())


def test_a_simulated_gpu_computes_in_half_precision() -> None:
    with torchdevice.simulate("cuda"):
        from flash_attn import flash_attn_func

        q, k, v = (
            torch.randn(2, 6, 2, 8, dtype=torch.float16, device="cuda", requires_grad=True)
            for _ in range(3)
        )
        found = flash_attn_func(q, k, v, causal=True, softcap=5.0)
        assert found.is_cuda and found.dtype == torch.float16
        expected, _ = attention(
            *(each.detach().cpu().double() for each in (q, k, v)), causal=True, softcap=5.0
        )
        torch.testing.assert_close(found.cpu().double(), expected, atol=2e-3, rtol=0)
        found.sum().backward()
        assert v.grad is not None and v.grad.is_cuda


def test_torch_compile_traces_a_stand_in_and_torch_func_differentiates_it(scope: Any) -> None:
    from flash_attn import flash_attn_func

    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64) for _ in range(3))
    compiled = torch.compile(
        lambda *given: flash_attn_func(*given, causal=True).sum(), backend="eager", fullgraph=True
    )
    expected = flash_attn_func(q, k, v, causal=True).sum()
    torch.testing.assert_close(compiled(q, k, v), expected)
    gradient = torch.func.grad(lambda given: flash_attn_func(given, k, v, causal=True).sum())(q)
    leaf = q.clone().requires_grad_()
    flash_attn_func(leaf, k, v, causal=True).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_autocast_does_not_see_inside(target: str) -> None:
    with torchdevice.portable(target=target):
        from causal_conv1d import causal_conv1d_fn
        from flash_attn import flash_attn_func

        q = torch.randn(1, 6, 2, 8, dtype=torch.float16, device="cuda")
        x, weight = torch.randn(1, 4, 6, device="cuda"), torch.randn(4, 3, device="cuda")
        expected = (
            flash_attn_func(q, q, q),
            flash_attn_func(q, q, q, softcap=3.0),
            causal_conv1d_fn(x, weight),
        )
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found = (
                flash_attn_func(q, q, q),
                flash_attn_func(q, q, q, softcap=3.0),
                causal_conv1d_fn(x, weight),
            )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
