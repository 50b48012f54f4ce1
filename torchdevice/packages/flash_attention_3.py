"""``flash_attn_interface``: the functions of flash_attn 3, which has no dropout and no ALiBi.

Inputs in FP8 are multiplied by their scales (``q_descale`` and the others) and computed in float32;
the result is in bfloat16. A row without keys has the logarithm minus infinity, where flash_attn 2
has plus infinity.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.thread_state import refuse
from torchdevice.packages import attention
from torchdevice.packages.attention import Attended, Rule
from torchdevice.packages.flash_attention import (
    Cache,
    Turn,
    attended_to_cache,
    bounds_of,
    check_cache,
    check_device,
    check_shapes,
    lengths_of,
)
from torchdevice.packages.registry import on_simulated_gpu, stands_in, wide_dtype

_MODULE = "flash_attn_interface"

_HALF = (torch.float16, torch.bfloat16)

_Scales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


# ---- what it refuses -----------------------------------------------------------------------------


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    check_shapes(q, k, v)
    if not on_simulated_gpu():
        return
    capability = check_device((q, k, v))
    if q.dtype not in (*_HALF, torch.float8_e4m3fn):
        raise RuntimeError("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if capability < (9, 0) and q.dtype not in _HALF:
        raise RuntimeError(
            "FlashAttention on Ampere/Ada cards only supports fp16 and bf16 data type"
        )
    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    if q.shape[-1] != v.shape[-1] and capability[0] != 9:
        raise RuntimeError("Only Hopper supports different V headdim")
    alignment = 8 if q.dtype in _HALF else 16
    for name, each in (("head_size", q), ("head_size_v", v)):
        if each.shape[-1] % alignment:
            raise RuntimeError(f"{name} should be a multiple of {alignment}")


def _without(function: str, attention_chunk: int, qv: torch.Tensor | None = None) -> None:
    """Refuse the arguments that nothing stands in for.

    Raises:
        NotSupportedError: One of them is given.
    """
    if attention_chunk:
        refuse(
            f"{_MODULE}.{function}(attention_chunk=...)",
            "Use scaled_dot_product_attention with a mask of chunks.",
        )
    if qv is not None:
        refuse(
            f"{_MODULE}.{function}(qv=...)", "Concatenate q with qv and k with v, and leave qv out."
        )


# ---- batches of sequences of one length ----------------------------------------------------------


@stands_in(f"{_MODULE}.flash_attn_func")
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Return the attention of q (batch, rows, heads, size) to k and v, whose size may differ.

    With ``return_attn_probs`` also the logarithm of each row's sum of exponentials (batch, heads,
    rows), which has no gradient. The scales of FP8 have the shape (batch, heads of the keys).
    """
    _without("flash_attn_func", attention_chunk, qv)
    _check(q, k, v)
    rule = _rule(softmax_scale, causal, window_size, softcap)
    return _attended(q, k, v, rule, (q_descale, k_descale, v_descale), return_attn_probs)


@stands_in(f"{_MODULE}.flash_attn_qkvpacked_func")
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Return the attention of queries, keys and values in one tensor.

    Args:
        qkv: (batch, rows, 3, heads, size); with ``num_heads_q`` (batch, rows, heads of q, k and v,
            size).
        num_heads_q: How many of the heads are queries.
    """
    _without("flash_attn_qkvpacked_func", attention_chunk)
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(-3)
    else:
        if num_heads_q is None:
            raise AssertionError("qkv has 4 dimensions, and num_heads_q is not given.")
        fewer = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, fewer, fewer], 2)
    _check(q, k, v)
    rule = _rule(softmax_scale, causal, window_size, softcap)
    return _attended(q, k, v, rule, (q_descale, k_descale, v_descale), return_attn_probs)


def _rule(scale: float | None, causal: bool, size: tuple[int, int], softcap: float) -> Rule:
    left, right = attention.window(causal, *size)
    return Rule(scale, left, right, softcap)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, scales: _Scales, asked: bool
) -> Any:
    given = _scaled(q, k, v, scales)
    found = attention.attend(*given, rule, lse=asked)
    out = found.out.to(_result(q.dtype))
    return (out, _logarithms(found)) if asked else out


def _logarithms(found: Attended) -> torch.Tensor:
    """Return the logarithms of sums, with minus infinity for a row without keys."""
    sums: Any = found.lse
    return sums.masked_fill(torch.isposinf(sums), -math.inf)


def _is_fp8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _result(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if _is_fp8(dtype) else dtype


def _scaled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: _Scales
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v (batch, rows, heads, size) times scales (batch, heads of the keys)."""
    if not _is_fp8(q.dtype) and all(scale is None for scale in scales):
        return q, k, v
    groups = q.shape[2] // k.shape[2]
    found = []
    for index, (each, scale) in enumerate(zip((q, k, v), scales, strict=True)):
        wide = each.to(wide_dtype(_result(each.dtype)))
        if scale is not None:
            spread = scale if index else scale.repeat_interleave(groups, 1)
            wide = wide * spread[:, None, :, None].to(wide.dtype)
        found.append(wide)
    return found[0], found[1], found[2]


# ---- sequences of different lengths --------------------------------------------------------------


@stands_in(f"{_MODULE}.flash_attn_varlen_func")
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Return the attention within each of several sequences that stand one after the other.

    Args:
        q: (rows of all sequences, heads, size).
        k: (keys of all sequences, heads or fewer, size).
        v: As ``k``; its size may differ.
        cu_seqlens_q: Where each sequence of q begins, and the end of the last: (sequences + 1,).
        cu_seqlens_k: The same of k and v.
        max_seqlen_q: Not needed here: no tensor of that size is made.
        max_seqlen_k: As above.
        seqused_q: How many rows of each sequence count, from its first: (sequences,). The others
            are 0.
        seqused_k: The same of k and v.

    Returns:
        As q, with the size of v. With ``return_attn_probs`` also the logarithms of sums (heads,
        rows of all sequences).
    """
    _without("flash_attn_varlen_func", attention_chunk, qv)
    _check(q, k, v)
    rule = _rule(softmax_scale, causal, window_size, softcap)
    rows = _places(bounds_of(cu_seqlens_q, "cu_seqlens_q"), seqused_q)
    keys = _places(bounds_of(cu_seqlens_k, "cu_seqlens_k"), seqused_k)
    if len(rows) != len(keys):
        raise RuntimeError(f"there are {len(rows)} sequences of q and {len(keys)} of k.")
    scales = q_descale, k_descale, v_descale
    parts, sums = [], []
    for index, ((start, used, stop), (first, last, _)) in enumerate(zip(rows, keys, strict=True)):
        own = [None if scale is None else scale[index : index + 1] for scale in scales]
        given = _scaled(
            q[None, start:used], k[None, first:last], v[None, first:last], (own[0], own[1], own[2])
        )
        found = attention.attend(*given, rule, lse=return_attn_probs)
        parts += [found.out[0], found.out.new_zeros(stop - used, *found.out.shape[2:])]
        if return_attn_probs:
            logarithms = _logarithms(found)[0]
            sums += [logarithms, logarithms.new_full((q.shape[1], stop - used), -math.inf)]
    out = torch.cat(parts) if parts else q.new_zeros(0, q.shape[1], v.shape[-1])
    out = out.to(_result(q.dtype))
    return (out, torch.cat(sums, 1)) if return_attn_probs else out


def _places(bounds: list[int], used: torch.Tensor | None) -> list[tuple[int, int, int]]:
    """Return where each sequence begins, where its used part ends, and where it ends."""
    pairs = list(itertools.pairwise(bounds))
    counts = [stop - start for start, stop in pairs] if used is None else used.tolist()
    return [
        (start, start + count, stop) for (start, stop), count in zip(pairs, counts, strict=True)
    ]


# ---- a cache of keys and values ------------------------------------------------------------------


@stands_in(f"{_MODULE}.flash_attn_with_kvcache")
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Return the attention of new rows to a cache, in which new keys and values are written first.

    It has no gradients, as the package's. The arguments are those of flash_attn 2, and these:

    Args:
        page_table: The pages of each sequence: (batch, most pages of one).
        cu_seqlens_q: Where the rows of each sequence begin in q (rows of all, heads, size), and the
            last end.
        cu_seqlens_k_new: The same of ``k`` and ``v``.
        rotary_seqlens: The places from which rows and new keys are rotated. Default:
            ``cache_seqlens``.
    """
    _without("flash_attn_with_kvcache", attention_chunk, qv)
    if any(scale is not None for scale in (q_descale, k_descale, v_descale)):
        refuse(
            f"{_MODULE}.flash_attn_with_kvcache(q_descale=...)", "Keep the cache in torch.bfloat16."
        )
    with torch.no_grad():
        _check(q, k_cache, v_cache)
        check_cache(k_cache, v_cache)
        rule = _rule(softmax_scale, causal, window_size, softcap)
        rows = _sequences(q, cu_seqlens_q, "cu_seqlens_q")
        cache = Cache(k_cache, v_cache, cache_batch_idx, page_table)
        lengths = lengths_of(cache_seqlens, len(rows), cache.most())
        turn = None if rotary_cos is None else Turn(rotary_cos, rotary_sin, rotary_interleaved)
        found = attended_to_cache(
            rows,
            _new_pairs(k, v, cu_seqlens_k_new),
            cache,
            lengths,
            rule,
            turn,
            None if cache_leftpad is None else cache_leftpad.tolist(),
            turned_from=None if rotary_seqlens is None else rotary_seqlens.tolist(),
            lse=return_softmax_lse,
        )
        return _joined(found, in_batch=cu_seqlens_q is None, lse=return_softmax_lse)


def _new_pairs(
    k: torch.Tensor | None, v: torch.Tensor | None, bounds: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return each sequence's new keys and values; None without any."""
    if k is None or v is None:
        return None
    keys, values = (_sequences(each, bounds, "cu_seqlens_k_new") for each in (k, v))
    return list(zip(keys, values, strict=True))


def _joined(found: list[Attended], *, in_batch: bool, lse: bool) -> Any:
    """Return the attention of all sequences, in a batch or one after the other.

    Args:
        found: The attention of each sequence.
        in_batch: Whether the sequences are a batch.
        lse: Whether to return the logarithms of sums too.
    """
    if in_batch:
        out = torch.cat([each.out for each in found])
        return (out, torch.cat([_logarithms(each) for each in found])) if lse else out
    out = torch.cat([each.out[0] for each in found])
    return (out, torch.cat([_logarithms(each)[0] for each in found], 1)) if lse else out


def _sequences(given: torch.Tensor, bounds: torch.Tensor | None, name: str) -> list[torch.Tensor]:
    """Return each sequence's rows, of a batch or of a tensor with one after the other."""
    if bounds is None:
        return list(given)
    return [given[start:stop] for start, stop, _ in _places(bounds_of(bounds, name), None)]


@stands_in(f"{_MODULE}.flash_attn_combine")
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to all keys, from that to each of several parts of them.

    Args:
        out_partial: (parts, batch, rows, heads, size).
        lse_partial: The logarithms of sums: (parts, batch, rows, heads).
        out: Where to write the result.
        out_dtype: Its dtype. Default: that of ``out_partial``.

    Returns:
        The attention (batch, rows, heads, size), and its logarithms of sums (batch, rows, heads).
    """
    sums = torch.logsumexp(lse_partial, 0)
    share = torch.exp(lse_partial - sums).nan_to_num(0.0)  # a row without keys in any part
    joined = (out_partial * share[..., None]).sum(0).to(out_dtype or out_partial.dtype)
    return (joined if out is None else out.copy_(joined)), sums


@stands_in(f"{_MODULE}.get_scheduler_metadata", Fidelity.INERT, "there is nothing to schedule")
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Return ``scheduler_metadata`` for ``flash_attn_with_kvcache``, which is unused here."""
    return torch.zeros(batch_size + 1, dtype=torch.int32, device=cache_seqlens.device)
