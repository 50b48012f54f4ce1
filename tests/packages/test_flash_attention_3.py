"""flash_attn_interface (flash_attn 3) and flash_attn.losses against float64 definitions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import attention, drawn, same_with_gradients

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.fixture
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_batches(scope: Any, causal: bool, window: tuple[int, int], softcap: float) -> None:
    from flash_attn_interface import flash_attn_func, flash_attn_qkvpacked_func

    q, k, v = drawn(2, 6, 4, 8), drawn(2, 4, 2, 8), drawn(2, 4, 2, 5)  # the size of values differs
    flags: dict[str, Any] = {"causal": causal, "softcap": softcap}
    expected, sums = attention(q, k, v, window=window, **flags)
    out, found = flash_attn_func(q, k, v, window_size=window, return_attn_probs=True, **flags)
    same_with_gradients(out, expected, (q, k, v))
    torch.testing.assert_close(found, sums.masked_fill(sums == math.inf, -math.inf).detach())
    own, fewer = drawn(2, 5, 8, 8), drawn(2, 5, 3, 4, 8)
    packed = flash_attn_qkvpacked_func(own, window_size=window, num_heads_q=4, **flags)
    torch.testing.assert_close(
        packed, attention(*own.split([4, 2, 2], 2), window=window, **flags)[0]
    )
    packed = flash_attn_qkvpacked_func(fewer, window_size=window, **flags)
    torch.testing.assert_close(packed, attention(*fewer.unbind(2), window=window, **flags)[0])


def test_sequences_of_which_a_part_is_used(scope: Any) -> None:
    from flash_attn_interface import flash_attn_varlen_func

    q, k, v = drawn(7, 4, 8), drawn(9, 2, 8), drawn(9, 2, 8)
    rows, keys = (torch.tensor(each, dtype=torch.int32) for each in ([0, 3, 7], [0, 4, 9]))
    used = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32)
    out, sums = flash_attn_varlen_func(
        q, k, v, rows, keys, 4, 5, *used, causal=True, return_attn_probs=True
    )
    first = attention(q[None, :3], k[None, :2], v[None, :2], causal=True)
    second = attention(q[None, 3:5], k[None, 4:9], v[None, 4:9], causal=True)
    expected = torch.cat([first[0][0], second[0][0], torch.zeros(2, 4, 8).double()])
    same_with_gradients(out, expected, (q, k, v))
    logarithms = torch.cat(
        [first[1][0], second[1][0], torch.full((4, 2), -math.inf).double()], 1
    ).detach()
    torch.testing.assert_close(sums, logarithms.masked_fill(logarithms == math.inf, -math.inf))
    whole = flash_attn_varlen_func(q, k, v, rows, keys, 4, 5)
    parts = [
        attention(q[None, a:b], k[None, c:d], v[None, c:d])[0][0]
        for a, b, c, d in ((0, 3, 0, 4), (3, 7, 4, 9))
    ]
    torch.testing.assert_close(whole, torch.cat(parts))


def test_fp8_with_scales(scope: Any) -> None:
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    q, k, v = (torch.randn(2, 6, heads, 16).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    wide = [each.double() for each in (q, k, v)]
    spread = scales[0].repeat_interleave(2, 1), *scales[1:]
    scaled = [
        each * scale[:, None, :, None].double() for each, scale in zip(wide, spread, strict=True)
    ]
    expected, _ = attention(*scaled, causal=True)
    names: dict[str, Any] = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    found = flash_attn_func(q, k, v, causal=True, **names)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.01)
    bounds = torch.tensor([0, 6, 12], dtype=torch.int32)
    flat = flash_attn_varlen_func(
        *(each.flatten(0, 1) for each in (q, k, v)), bounds, bounds, 6, 6, causal=True, **names
    )
    torch.testing.assert_close(flat, found.flatten(0, 1))


class TestCache:
    """``flash_attn_with_kvcache``."""

    def test_as_flash_attn_2(self, scope: Any) -> None:
        from flash_attn import flash_attn_with_kvcache as second
        from flash_attn_interface import flash_attn_with_kvcache

        pages, table = torch.randn(2, 5, 4, 2, 8), torch.tensor([[4, 1], [2, 3]], dtype=torch.int32)
        q, new = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 2, 2, 8)
        angles = torch.rand(8, 4)
        lengths = torch.tensor([5, 2], dtype=torch.int32)
        copy = pages.clone()
        given = *new, angles.cos(), angles.sin(), lengths
        expected = second(q, *copy, *given, block_table=table, causal=True, return_softmax_lse=True)
        names = dict(
            zip(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"), given, strict=True)
        )
        found = flash_attn_with_kvcache(
            q, *pages, page_table=table, causal=True, return_softmax_lse=True, **names
        )
        torch.testing.assert_close((found, pages), (expected, copy))

    def test_rows_of_different_lengths(self, scope: Any) -> None:
        from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

        cache = torch.randn(2, 2, 8, 2, 6, dtype=torch.float64)
        q = torch.randn(3, 4, 6, dtype=torch.float64)
        new = torch.randn(2, 3, 2, 6, dtype=torch.float64)
        bounds = torch.tensor([0, 1, 3], dtype=torch.int32)
        lengths = torch.tensor([4, 2], dtype=torch.int32)
        plan = get_scheduler_metadata(2, 2, 8, 4, 2, 6, lengths)
        more: dict[str, Any] = {
            "cu_seqlens_q": bounds,
            "cu_seqlens_k_new": bounds,
            "max_seqlen_q": 2,
        }
        out, sums = flash_attn_with_kvcache(
            q,
            *cache,
            *new,
            cache_seqlens=lengths,
            causal=True,
            scheduler_metadata=plan,
            return_softmax_lse=True,
            **more,
        )
        for n, (start, stop, seen) in enumerate(((0, 1, 5), (1, 3, 4))):
            torch.testing.assert_close(cache[:, n, seen - stop + start : seen], new[:, start:stop])
            expected = attention(
                q[None, start:stop], *(each[n : n + 1, :seen] for each in cache), causal=True
            )
            torch.testing.assert_close(
                (out[start:stop], sums[:, start:stop]), (expected[0][0], expected[1][0])
            )

    def test_places_of_rotation(self, scope: Any) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        cache, q = torch.randn(2, 1, 6, 1, 4), torch.randn(1, 1, 1, 4)
        angles = torch.rand(9, 2)
        given: dict[str, Any] = {"cache_seqlens": 5, "causal": True, "k": q, "v": q}
        turned = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        found = flash_attn_with_kvcache(
            q, *cache.clone(), rotary_seqlens=torch.tensor([2]), **given, **turned
        )
        moved = {name: torch.cat([each[2:3]] * 9) for name, each in turned.items()}
        torch.testing.assert_close(
            found, flash_attn_with_kvcache(q, *cache.clone(), **given, **moved)
        )
        assert not torch.allclose(
            found, flash_attn_with_kvcache(q, *cache.clone(), **given, **turned)
        )


def test_parts_of_the_keys_are_combined(scope: Any) -> None:
    from flash_attn_interface import flash_attn_combine, flash_attn_func

    q, k, v = (torch.randn(2, size, 2, 8) for size in (3, 6, 6))
    parts = [
        flash_attn_func(q, k[:, n : n + 2], v[:, n : n + 2], return_attn_probs=True)
        for n in (0, 2, 4)
    ]
    outs = torch.stack([each[0] for each in parts])
    sums = torch.stack([each[1].transpose(1, 2) for each in parts])
    expected, logarithms = flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(
        flash_attn_combine(outs, sums), (expected, logarithms.transpose(1, 2))
    )
    nothing, none = flash_attn_combine(
        torch.zeros(2, 1, 1, 1, 4), torch.full((2, 1, 1, 1), -math.inf)
    )
    assert not nothing.any() and none.item() == -math.inf


class TestRefusals:
    """What is refused, in the package's words on simulated GPUs."""

    def test_arguments_without_a_stand_in(self, scope: Any) -> None:
        from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

        q = torch.randn(1, 4, 2, 8)
        for name, value in (("attention_chunk", 2), ("qv", q)):
            with pytest.raises(torchdevice.errors.NotSupportedError, match=name):
                flash_attn_func(q, q, q, **{name: value})
        with pytest.raises(torchdevice.errors.NotSupportedError, match="q_descale"):
            flash_attn_with_kvcache(q, q, q, q_descale=torch.ones(1, 2))

    @pytest.mark.parametrize(
        ("gpu", "dtype", "size", "message"),
        [
            ("t4", torch.float16, 64, "only supports Ampere GPUs or newer"),
            ("a100", torch.float8_e4m3fn, 64, "on Ampere/Ada cards only supports fp16 and bf16"),
            ("h100", torch.float32, 64, "only supports fp16, bf16, and fp8_e4m3 data type"),
            ("h100", torch.float16, 264, "head dimension at most 256"),
            ("h100", torch.float16, 12, "head_size should be a multiple of 8"),
            ("h100", torch.float8_e4m3fn, 24, "head_size should be a multiple of 16"),
        ],
    )
    def test_a_simulated_gpu(self, gpu: str, dtype: torch.dtype, size: int, message: str) -> None:
        with torchdevice.simulate(gpu):
            from flash_attn_interface import flash_attn_func

            q = torch.randn(1, 4, 2, size, device="cuda").to(dtype)
            with pytest.raises(RuntimeError, match=message):
                flash_attn_func(q, q, q)

    def test_sizes_of_values_on_ampere(self) -> None:
        with torchdevice.simulate("a100"):
            from flash_attn_interface import flash_attn_func

            q = torch.randn(1, 4, 2, 64, device="cuda", dtype=torch.float16)
            with pytest.raises(RuntimeError, match="Only Hopper supports different V headdim"):
                flash_attn_func(q, q, q[..., :32])
            with pytest.raises(RuntimeError, match="k must be on CUDA"):
                flash_attn_func(q, q.cpu(), q.cpu())
            assert flash_attn_func(q, q, q).is_cuda


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("squared", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(
    scope: Any, smoothing: float, scale: float, squared: float, reduction: str
) -> None:
    from flash_attn.losses.cross_entropy import CrossEntropyLoss

    logits, labels = drawn(5, 7), torch.tensor([3, 0, -100, 6, 2])
    module = CrossEntropyLoss(
        reduction=reduction,
        label_smoothing=smoothing,
        logit_scale=scale,
        lse_square_scale=squared,
        return_z_loss=True,
    )
    losses, added = [], []
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label == -100:
            losses.append(row.sum() * 0)
            added.append(row.sum() * 0)
            continue
        total = torch.log(torch.exp(row * scale).sum())
        aims = torch.full((7,), smoothing / 7, dtype=torch.float64)
        aims[label] += 1 - smoothing
        added.append(squared * total**2)
        losses.append((aims * (total - row * scale)).sum() + added[-1])
    reduced = {"mean": lambda each: each.sum() / 4, "sum": torch.sum, "none": lambda each: each}[
        reduction
    ]
    found, z_loss = module(logits, labels)
    same_with_gradients(found, reduced(torch.stack(losses)), (logits,))
    torch.testing.assert_close(z_loss, reduced(torch.stack(added)).detach())
    assert not z_loss.requires_grad


def test_cross_entropy_with_sums_that_are_known(scope: Any) -> None:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    logits, labels = drawn(4, 6), torch.tensor([1, 5, 0, 3])
    found = cross_entropy_loss(logits, labels, logits.detach().logsumexp(1))[0]
    same_with_gradients(
        found, torch.nn.functional.cross_entropy(logits, labels, reduction="none"), (logits,)
    )
    half = cross_entropy_loss(logits.to(torch.bfloat16), labels)[0]
    assert half.dtype == torch.float32
    with pytest.raises(AssertionError, match="have the shapes"):
        cross_entropy_loss(logits, labels[:2])
    with pytest.raises(torchdevice.errors.NotSupportedError, match="process_group"):
        cross_entropy_loss(logits, labels, process_group=object())


def test_cross_entropy_takes_cuda_tensors_only_on_a_simulated_gpu() -> None:
    with torchdevice.simulate("a100"):
        from flash_attn.losses.cross_entropy import CrossEntropyLoss

        logits, labels = torch.randn(2, 3, device="cuda"), torch.tensor([0, 2], device="cuda")
        torch.testing.assert_close(
            CrossEntropyLoss()(logits, labels), torch.nn.functional.cross_entropy(logits, labels)
        )
        with pytest.raises(AssertionError, match="Only support CUDA tensors"):
            CrossEntropyLoss()(logits.cpu(), labels.cpu())
