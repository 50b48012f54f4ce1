"""Functions of ``flash_attn`` 2, as its documentation defines them, with ``bert_padding``.

On a simulated GPU they raise the errors of the package's kernels: other dtypes than float16 and
bfloat16, head sizes above 256, softcap with dropout, a cache whose last dimension is not
contiguous, and GPUs before Ampere. Elsewhere they take every floating-point dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.thread_state import state
from torchdevice.packages import attention
from torchdevice.packages.attention import Attended, Rule
from torchdevice.packages.registry import on_simulated_gpu, report, stands_in, unseen

_HALF = (torch.float16, torch.bfloat16)

_MODULE = "flash_attn.flash_attn_interface"


def _named(name: str) -> str:
    return f"{_MODULE}.{name} flash_attn.{name}"


# ---- what the kernels refuse ---------------------------------------------------------------------


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Run the checks for every target.

    Raises:
        RuntimeError: The tensors do not fit each other.
    """
    # Each look at a shape builds a new object.
    of_q, of_k, of_v = (each.shape for each in (q, k, v))
    if of_q[-1] != of_k[-1] or of_k[:-1] != of_v[:-1]:
        raise RuntimeError(
            f"shapes {tuple(of_q)}, {tuple(of_k)} and {tuple(of_v)} of q, k, v do not fit."
        )
    if not of_k[-2] or of_q[-2] % of_k[-2]:
        raise RuntimeError(
            f"q has {of_q[-2]} heads and k has {of_k[-2]}. Use a number of heads of k and v that "
            "divides q's."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(
            f"q, k and v have the dtypes {q.dtype}, {k.dtype} and {v.dtype}. Use one dtype for "
            "them."
        )


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check that tensors fit each other, and on a simulated GPU the kernels."""
    with unseen():
        check_shapes(q, k, v)
        if on_simulated_gpu():
            _check_as_kernels((q, k, v))


def _check_as_kernels(given: tuple[torch.Tensor, ...]) -> None:
    """Raise the errors of the package's kernels, which copy tensors with gaps."""
    check_device(given)
    for each in given:
        if each.dtype not in _HALF:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if each.shape[-1] > 256:
            raise RuntimeError("FlashAttention forward only supports head dimension at most 256")


def check_device(given: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """Check that q, k and v are on a GPU that the kernels run on, and return its capability.

    Raises:
        RuntimeError: The GPU is older than Ampere, or a tensor is not on it.
    """
    context: Any = state.context
    capability: tuple[int, int] = context.devices.figure(
        "capability", max(0, given[0].get_device())
    )
    if capability < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    for name, each in zip("qkv", given, strict=True):
        if not each.is_cuda and each.device.type != context.device_type:
            raise RuntimeError(f"{name} must be on CUDA")
    return capability


def _rule(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> Rule:
    if not 0.0 <= dropout_p < 1.0:
        raise RuntimeError(f"dropout_p={dropout_p!r} is not a probability below 1.")
    if dropout_p and softcap > 0 and on_simulated_gpu():
        raise RuntimeError("Softcapping does not support dropout for now")
    if dropout_p:
        report(_MODULE, "dropout with torch's random numbers", Fidelity.APPROXIMATE)
    left, right = attention.window(causal, *window_size)
    return Rule(softmax_scale, left, right, softcap, alibi_slopes, None, dropout_p)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, asked: bool) -> Any:
    """Return attention, with logarithms of sums and weights if they are requested."""
    found = attention.attend(q, k, v, rule, lse=asked, weights=asked)
    return tuple(found) if asked else found.out


# ---- batches of sequences of one length ----------------------------------------------------------


@stands_in(_named("flash_attn_func"))
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention of q (batch, rows, heads, size) to k and v (batch, keys, heads, size).

    With ``return_attn_probs`` also the logarithm of each row's sum of exponentials, in float32 or
    wider, and the weights, negative where dropout left one out. Both have no gradient.
    """
    _check(q, k, v)
    rule = _rule(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attended(q, k, v, rule, return_attn_probs)


@stands_in(_named("flash_attn_kvpacked_func"))
def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return the attention to keys and values in one tensor (batch, keys, 2, heads, size)."""
    k, v = kv.unbind(2)
    _check(q, k, v)
    rule = _rule(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attended(q, k, v, rule, return_attn_probs)


@stands_in(_named("flash_attn_qkvpacked_func"))
def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention with q, k and v in one tensor (batch, rows, 3, heads, size)."""
    q, k, v = qkv.unbind(2)
    _check(q, k, v)
    rule = _rule(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attended(q, k, v, rule, return_attn_probs)


# ---- sequences of different lengths --------------------------------------------------------------


@stands_in(_named("flash_attn_varlen_func"))
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Return the attention within each of several sequences that stand one after the other.

    Args:
        q: (rows of all sequences, heads, size).
        k: (keys of all sequences, heads or fewer, size); with ``block_table`` (pages, keys of a
            page, heads, size).
        v: As ``k``.
        cu_seqlens_q: Where each sequence of q begins, and the end of the last: (sequences + 1,).
        cu_seqlens_k: The same of k and v.
        max_seqlen_q: Not needed here: no tensor of that size is made.
        max_seqlen_k: As above.
        block_table: The pages of each sequence: (sequences, most pages of one).

    Returns:
        As q. With ``return_attn_probs`` also the logarithms of sums, (heads, rows of all
        sequences), and the weights, (sequences, heads, most rows, most keys).
    """
    _check(q, k, v)
    rule = _rule(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    rows, keys = bounds_of(cu_seqlens_q, "cu_seqlens_q"), bounds_of(cu_seqlens_k, "cu_seqlens_k")
    if len(rows) != len(keys):
        raise RuntimeError(f"there are {len(rows) - 1} sequences of q and {len(keys) - 1} of k.")
    if block_table is None and _are_equal(rows) and _are_equal(keys) and rows[-1] and keys[-1]:
        return _equally_long(
            q[: rows[-1]], k[: keys[-1]], v[: keys[-1]], len(rows) - 1, rule, return_attn_probs
        )
    found = []
    for index, (start, stop) in enumerate(_pairs(rows)):
        own_k, own_v = _keys_of_sequence(k, v, keys, index, block_table)
        given = q[None, start:stop], own_k[None], own_v[None], rule.of_sequence(index)
        found.append(attention.attend(*given, lse=return_attn_probs, weights=return_attn_probs))
    out = torch.cat([each.out[0] for each in found]) if found else torch.zeros_like(q)
    return (out, *_sums_and_weights(found, rows, keys)) if return_attn_probs else out


def _keys_of_sequence(
    k: torch.Tensor, v: torch.Tensor, keys: list[int], index: int, pages: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of a sequence, which pages of its own may have."""
    first, last = keys[index], keys[index + 1]
    if pages is not None:
        return _paged(k, v, pages[index], last - first)
    return k[first:last], v[first:last]


def _sums_and_weights(
    found: list[Attended], rows: list[int], keys: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithms of sums one after the other, and weights padded to one shape."""
    longest = (
        max(stop - start for start, stop in _pairs(rows)),
        max(stop - start for start, stop in _pairs(keys)),
    )
    sums = torch.cat([each.lse[0] for each in found if each.lse is not None], 1)
    return sums, torch.cat([_padded(each, longest) for each in found])


def bounds_of(lengths: torch.Tensor, name: str) -> list[int]:
    """Return where sequences begin and end, from their cumulated lengths."""
    if lengths.dtype != torch.int32 or lengths.dim() != 1:
        raise RuntimeError(
            f"{name} has {lengths.dim()} dimensions of {lengths.dtype}. Use one, of torch.int32."
        )
    return lengths.tolist()


def _pairs(bounds: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(bounds))


def _are_equal(bounds: list[int]) -> bool:
    return len({stop - start for start, stop in _pairs(bounds)}) == 1 and not bounds[0]


def _equally_long(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: int, rule: Rule, asked: bool
) -> Any:
    """Attend in all sequences at once, where they have one length."""
    batch = [each.reshape(count, -1, *each.shape[1:]) for each in (q, k, v)]
    found = attention.attend(batch[0], batch[1], batch[2], rule, lse=asked, weights=asked)
    out = found.out.reshape(q.shape[0], *found.out.shape[2:])
    if found.lse is None:
        return out
    return out, found.lse.transpose(0, 1).reshape(q.shape[1], -1), found.weights


def _padded(found: Attended, size: tuple[int, int]) -> torch.Tensor:
    weights: Any = found.weights
    rows, keys = size
    return functional.pad(weights, (0, keys - weights.shape[-1], 0, rows - weights.shape[-2]))


def _paged(
    k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of a sequence that are in pages."""
    count = -(-length // k.shape[1])
    chosen = pages[:count].long()
    return k[chosen].flatten(0, 1)[:length], v[chosen].flatten(0, 1)[:length]


@stands_in(_named("flash_attn_varlen_kvpacked_func"))
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention per sequence, with keys and values in one (keys, 2, heads, size)."""
    more = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _unwrapped(flash_attn_varlen_func)(q, *kv.unbind(1), *lengths, *more)


@stands_in(_named("flash_attn_varlen_qkvpacked_func"))
def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Return attention per sequence, with q, k and v in one tensor (rows, 3, heads, size)."""
    more = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return _unwrapped(flash_attn_varlen_func)(*qkv.unbind(1), *lengths, *more)


def _unwrapped(function: Any) -> Callable[..., Any]:
    """Return a stand-in that reports nothing: the function that calls it has reported itself."""
    return function.__wrapped__


# ---- a cache of keys and values ------------------------------------------------------------------


@stands_in(_named("flash_attn_with_kvcache"))
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Return the attention of new rows to a cache, in which new keys and values are written first.

    It has no gradients, as the package's.

    Args:
        q: (batch, rows, heads, size).
        k_cache: (batch of the cache, most keys, heads or fewer, size); with ``block_table`` (pages,
            keys of a page, heads, size). Written to in place where ``k`` is given.
        v_cache: As ``k_cache``.
        k: New keys (batch, new keys, heads, size), which come after the first ``cache_seqlens``
            keys.
        v: As ``k``.
        rotary_cos: Cosines (positions, half of the rotated size). New keys are rotated by their
            places, and rows too: with ``causal`` or a window by their places, and otherwise all by
            ``cache_seqlens``.
        rotary_sin: As ``rotary_cos``.
        cache_seqlens: How many keys of each sequence count, without the new ones: an int or
            (batch,). Default: all.
        cache_batch_idx: Which sequence of the cache each of the batch is: (batch,).
        cache_leftpad: How many keys at the beginning of each sequence do not count: (batch,).
        block_table: The pages of each sequence: (batch, most pages of one).
        return_softmax_lse: Whether to return the logarithms of sums too: (batch, heads, rows).
    """
    with torch.no_grad():
        _check(q, k_cache, v_cache)
        check_cache(k_cache, v_cache)
        left, right = attention.window(causal, *window_size)
        rule = Rule(softmax_scale, left, right, softcap, alibi_slopes)
        cache = Cache(k_cache, v_cache, cache_batch_idx, block_table)
        found = attended_to_cache(
            list(q),
            _new_keys(k, v),
            cache,
            lengths_of(cache_seqlens, q.shape[0], cache.most()),
            rule,
            Turn.of(rotary_cos, rotary_sin, rotary_interleaved),
            None if cache_leftpad is None else cache_leftpad.tolist(),
            lse=return_softmax_lse,
        )
        out = torch.cat([each.out for each in found])
        return (out, torch.cat([each.lse for each in found])) if return_softmax_lse else out  # type: ignore[misc]


def _new_keys(
    k: torch.Tensor | None, v: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return the new keys and values of each sequence; None where there are none."""
    return None if k is None or v is None else list(zip(k, v, strict=True))


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Check on a simulated GPU what the package demands of a cache, which it cannot copy.

    Raises:
        AssertionError: The last dimension of one is not contiguous.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if on_simulated_gpu() and cache.stride(-1) != 1:
            raise AssertionError(f"{name} must have contiguous last dimension")


def attended_to_cache(
    rows: list[torch.Tensor],
    new: list[tuple[torch.Tensor, torch.Tensor]] | None,
    cache: Cache,
    lengths: list[int],
    rule: Rule,
    turn: Turn | None,
    padding: list[int] | None,
    *,
    turned_from: list[int] | None = None,
    lse: bool,
) -> list[Attended]:
    """Return the attention of each sequence's new rows to its keys in a cache.

    Args:
        rows: (rows, heads, size) of each sequence.
        new: The keys and values that are written first: (new keys, heads, size) of each sequence.
        cache: The cache.
        lengths: How many keys of each sequence the cache has.
        rule: Which keys a row sees.
        turn: Rotates rows and new keys; None for no rotation.
        padding: How many keys at the beginning of each sequence do not count.
        turned_from: The places from which rows and new keys are rotated. Default: ``lengths``.
        lse: Whether logarithms of sums are asked for.
    """
    found = []
    in_order = rule.left is not None or rule.right is not None
    for index, (own, length) in enumerate(zip(rows, lengths, strict=True)):
        place = length if turned_from is None else turned_from[index]
        own = own if turn is None else turn(own, place, in_order)
        count = 0
        if new is not None:
            k, v = new[index]
            count = len(k)
            cache.write(index, length, k if turn is None else turn(k, place, True), v)
        begin = 0 if padding is None else padding[index]
        keys, values = (each[None, begin:] for each in cache.read(index, length + count))
        found.append(attention.attend(own[None], keys, values, rule.of_sequence(index), lse=lse))
    return found


def lengths_of(given: int | torch.Tensor | None, batch: int, most: int) -> list[int]:
    """Return how many keys of each sequence count."""
    if isinstance(given, torch.Tensor):
        return given.tolist() if given.dim() else [int(given)] * batch
    return [most if given is None else given] * batch


class Cache:
    """A cache of keys and values: a sequence in each row, or in pages."""

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: torch.Tensor | None,
        pages: torch.Tensor | None,
    ):
        self.both = k, v
        self.rows = None if rows is None else rows.tolist()
        self.pages = pages

    def most(self) -> int:
        """Return how many keys a sequence can have."""
        k = self.both[0]
        return k.shape[1] if self.pages is None else k.shape[1] * self.pages.shape[1]

    def read(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first keys and values of a sequence."""
        if self.pages is not None:
            return _paged(*self.both, self.pages[index], length)
        row = index if self.rows is None else self.rows[index]
        k, v = self.both
        return k[row, :length], v[row, :length]

    def write(self, index: int, at: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values of a sequence, from a place on.

        Raises:
            RuntimeError: They do not fit in the cache. The package would write beyond its memory.
        """
        if at + len(k) > self.most():
            raise RuntimeError(
                f"{len(k)} new keys after {at} do not fit in a cache of {self.most()}."
            )
        for cache, new in zip(self.both, (k, v), strict=True):
            if self.pages is None:
                cache[index if self.rows is None else self.rows[index], at : at + len(new)] = new
            else:
                places = torch.arange(at, at + len(new), device=cache.device)
                cache[
                    self.pages[index][places // cache.shape[1]].long(), places % cache.shape[1]
                ] = new


class Turn:
    """Rotates rows of a sequence by their places."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor | None, interleaved: bool):
        if sin is None:
            raise RuntimeError("rotary_cos is given without rotary_sin. Give both, or neither.")
        self.cos = cos
        self.sin = sin
        self.interleaved = interleaved

    @classmethod
    def of(
        cls, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
    ) -> Turn | None:
        """Return the rotation by a table of cosines; None without one."""
        return None if cos is None else cls(cos, sin, interleaved)

    def __call__(self, rows: torch.Tensor, at: int, in_order: bool) -> torch.Tensor:
        """Rotate rows (rows, heads, size) from a place on, or all of them by one place."""
        # Here, because that file may be needed alone.
        from torchdevice.packages.rotary_embedding import rotated

        chosen = slice(at, at + len(rows)) if in_order else slice(at, at + 1)
        return rotated(rows, self.cos[chosen], self.sin[chosen], self.interleaved)


# ---- padding -------------------------------------------------------------------------------------


@stands_in("flash_attn.bert_padding.index_first_axis")
def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of a tensor at indices."""
    return input[indices]


@stands_in("flash_attn.bert_padding.index_put_first_axis")
def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Return ``first_axis_dim`` rows of zeros with ``values`` in the rows at indices."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_put((indices,), values)


@stands_in("flash_attn.bert_padding.unpad_input")
def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Return the tokens of a batch that count, one after the other.

    Args:
        hidden_states: (batch, length, ...).
        attention_mask: Which tokens count: (batch, length), bool or 0 and 1.
        unused_mask: Which further tokens are kept, although they are not used.

    Returns:
        The tokens; their places in the flat batch; where each sequence begins, and the end of the
        last; the longest length; how many tokens of each sequence are used.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    places = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    bounds = functional.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    tokens = hidden_states.flatten(0, 1)[places]
    return tokens, places, bounds, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


@stands_in("flash_attn.bert_padding.pad_input")
def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Return a batch (batch, seqlen, ...) with tokens at their places, and zeros elsewhere."""
    return _unwrapped(index_put_first_axis)(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )
