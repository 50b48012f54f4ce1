"""Attention as the packages define it: softmax over the keys that a row may see, in blocks of rows.

For a query i of Sq and a key j of Sk, ``i + Sk - Sq`` is the key at the query's own place: packages
align the last query with the last key. A row without any key is 0.

Queries have the shape (batch, rows, heads, head size), keys and values the same with as many heads
or a divisor of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from torchdevice.packages.registry import unseen, wide_dtype, without_autocast

_ROWS = 1024
"""Rows of one block, where each row sees only some of the keys."""

_SCORES = 1 << 24
"""Scores of one block, where this file computes them itself."""


class Rule(NamedTuple):
    """Which keys a row sees, and how scores are changed.

    Attributes:
        scale: The factor of the scores; None for the inverse square root of the head size.
        left: How many keys before its own a row sees; None for all.
        right: How many keys after its own a row sees; None for all.
        softcap: Scores become ``softcap * tanh(score / softcap)``; 0 leaves them.
        slopes: ALiBi: ``slope * |distance|`` is subtracted. Of shape (heads,) or (batch, heads).
        bias: Added to the scores, of a shape that fits (batch, heads, rows, keys).
        dropout: The probability with which a weight is left out.
    """

    scale: float | None = None
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dropout: float = 0.0

    def of_sequence(self, index: int) -> Rule:
        """Return the rule of one sequence of a batch, whose slopes may differ."""
        if self.slopes is None or self.slopes.dim() == 1:
            return self
        return self._replace(slopes=self.slopes[index : index + 1])


class Attended(NamedTuple):
    """The result of :func:`attend`.

    Attributes:
        out: As the queries.
        lse: Logarithm of the sum of the exponentials of each row's scores: (batch, heads, rows), in
            float32 or wider. Infinity for a row without keys. None where it was not asked for.
        weights: The weights, (batch, heads, rows, keys), with a sign that is negative where dropout
            left one out. None where they were not asked for.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    weights: torch.Tensor | None


def window(causal: bool, left: int, right: int) -> tuple[int | None, int | None]:
    """Return ``left`` and ``right`` of a :class:`Rule` for a window; a negative number is all."""
    before = None if left < 0 else left
    if causal:
        return before, 0
    return before, None if right < 0 else right


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    *,
    lse: bool = False,
    weights: bool = False,
) -> Attended:
    """Return the attention of queries to keys and values.

    Args:
        q: (batch, rows, heads, head size).
        k: (batch, keys, heads of the keys, head size).
        v: (batch, keys, heads of the keys, head size of the values).
        rule: Which keys a row sees.
        lse: Whether ``lse`` is asked for.
        weights: Whether ``weights`` are asked for.
    """
    with unseen():
        (batch, rows, heads, _), (_, keys, groups, _) = q.shape, k.shape
    # Torch's function has no such scores and returns neither.
    own = bool(rule.softcap or lse or weights)
    if not own and _is_torchs(rows, keys, rule):
        is_causal = rule.right == 0 and rows > 1
        with without_autocast(q):
            return Attended(_by_torch(q, k, v, None, is_causal, rule, heads != groups), None, None)
    empty = rows if not keys else _rows_without_keys(rows, keys, rule)
    parts = [_nothing(q[:, :empty], k, v, lse=lse, weights=weights)] if empty or not rows else []
    step = _rows_of_block(rows, batch * heads * keys, rule, own=own)
    for start in range(empty, rows, step):
        stop = min(start + step, rows)
        first, last = _keys_of_rows(start, stop, rows, keys, rule)
        block = _Block(start + keys - rows - first, start, stop, first, last, keys)
        given = (
            _part(q, start, stop, rows),
            _part(k, first, last, keys),
            _part(v, first, last, keys),
        )
        with without_autocast(q):
            if own:
                part = _own(*given, rule, block, weights=weights)
            else:
                part = _torchs(*given, rule, block, grouped=heads != groups)
        parts.append(part)
    return _joined(parts, lse=lse)


def _is_torchs(rows: int, keys: int, rule: Rule) -> bool:
    """Return whether torch's function has the rule, without a mask and for all rows at once."""
    if not rows or not keys or rule.left is not None:
        return False
    if rule.slopes is not None or rule.bias is not None:
        return False
    return rule.right is None or (rule.right == 0 and rows == keys)


class _Block(NamedTuple):
    """A block of rows, and the keys that they see.

    Attributes:
        offset: The key in the block at the place of the first row.
        start: The first row.
        stop: The row after the last.
        first: The first key.
        last: The key after the last.
        keys: The number of all keys.
    """

    offset: int
    start: int
    stop: int
    first: int
    last: int
    keys: int


def _rows_without_keys(rows: int, keys: int, rule: Rule) -> int:
    """Return how many first rows see no key: their last key would be before the first one."""
    return 0 if rule.right is None else min(max(0, rows - keys - rule.right), rows)


def _rows_of_block(rows: int, scores: int, rule: Rule, *, own: bool) -> int:
    """Return how many rows are computed at once, of a batch in which one row has so many scores."""
    if own:
        rows = min(rows, max(16, _SCORES // max(1, scores)))
    # In one call, except where a mask of all rows by all keys serves rows that see few keys.
    elif rule.left is not None or rule.slopes is not None:
        rows = min(rows, _ROWS)
    return max(1, rows)


def _part(tensor: torch.Tensor, start: int, stop: int, length: int) -> torch.Tensor:
    """Return some rows of a tensor, which has so many."""
    return tensor if (start, stop) == (0, length) else tensor[:, start:stop]


def _keys_of_rows(start: int, stop: int, rows: int, keys: int, rule: Rule) -> tuple[int, int]:
    """Return the first key that some row of a block sees, and the key after the last."""
    place = keys - rows
    first = 0 if rule.left is None else max(0, start + place - rule.left)
    last = keys if rule.right is None else min(keys, stop + place + rule.right)
    return min(first, keys), max(last, min(first, keys))


def _nothing(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lse: bool, weights: bool
) -> Attended:
    """Return the result of rows without keys, linked to its inputs for gradients of 0."""
    batch, rows, heads, _ = q.shape
    linked = q.new_zeros(())
    if torch.is_grad_enabled():
        linked = (q.sum() + k.sum() + v.sum()) * 0
    out = q.new_zeros(batch, rows, heads, v.shape[-1]) + torch.nan_to_num(linked)
    infinite = torch.full(
        (batch, heads, rows), math.inf, dtype=wide_dtype(q.dtype), device=q.device
    )
    none = q.new_zeros(batch, heads, rows, k.shape[1])
    return Attended(out, infinite if lse else None, none if weights else None)


def _joined(parts: list[Attended], *, lse: bool) -> Attended:
    if len(parts) == 1:
        out, sums, found = parts[0]
    else:
        out = torch.cat([part.out for part in parts], 1)
        sums = _along_rows([part.lse for part in parts])
        found = _along_rows([part.weights for part in parts])
    return Attended(out, sums if lse else None, found)


def _along_rows(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return parts one after the other; None where one of them was not asked for."""
    given = [part for part in parts if part is not None]
    return torch.cat(given, 2) if len(given) == len(parts) else None


def _distance(q: torch.Tensor, k: torch.Tensor, block: _Block) -> torch.Tensor:
    """Return how many places each key of a block is after the row's own: (rows, keys)."""
    rows = torch.arange(q.shape[1], device=q.device)
    return torch.arange(k.shape[1], device=q.device) - (rows + block.offset)[:, None]


def _visible(distance: torch.Tensor, rule: Rule) -> torch.Tensor | None:
    """Return a mask of the keys that each row sees; None where it sees all."""
    seen = None
    if rule.right is not None:
        seen = distance <= rule.right
    if rule.left is not None:
        near = distance >= -rule.left
        seen = near if seen is None else seen & near
    return seen


def _bias(
    q: torch.Tensor, distance: torch.Tensor, rule: Rule, block: _Block
) -> torch.Tensor | None:
    """Return the bias of a block's scores, or None: (batch or 1, heads, rows, keys)."""
    bias = None
    if rule.slopes is not None:
        slopes = rule.slopes.to(wide_dtype(q.dtype)).reshape(-1, q.shape[2], 1, 1)
        bias = -slopes * distance.abs()
    if rule.bias is not None:
        part = rule.bias[..., block.start : block.start + q.shape[1], block.first : block.last]
        bias = part if bias is None else bias + part
    return bias


def _torchs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, block: _Block, *, grouped: bool
) -> Attended:
    """Compute a block by torch's own attention."""
    rows, keys = block.stop - block.start, block.last - block.first
    is_causal = _is_causal(rows, keys, rule, block)
    has_bias = rule.slopes is not None or rule.bias is not None
    mask, narrow = None, None
    if has_bias or not (is_causal or _sees_all(keys, rule, block)):
        is_causal = False
        mask = _mask(q, k, rule, block)
        if mask is not None and mask.is_floating_point() and mask.dtype != q.dtype:
            # A float32 bias with half-precision queries: rounding would move far keys' scores.
            narrow = q.dtype
            q = q.to(mask.dtype)
            k = k.to(mask.dtype)
            v = v.to(mask.dtype)
    out = _by_torch(q, k, v, mask, is_causal and rows > 1, rule, grouped)
    return Attended(out if narrow is None else out.to(narrow), None, None)


def _by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    rule: Rule,
    grouped: bool,
) -> torch.Tensor:
    with unseen():
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        q, k, v, mask, rule.dropout, is_causal, scale=rule.scale, enable_gqa=grouped
    )
    with unseen():
        return out.transpose(1, 2)


def _is_causal(rows: int, keys: int, rule: Rule, block: _Block) -> bool:
    """Return whether a block is causal as torch defines it: the first row sees the first key."""
    has_causal_window = rule.right == 0 and rule.left is None
    return has_causal_window and block.offset == 0 and rows == keys


def _sees_all(keys: int, rule: Rule, block: _Block) -> bool:
    """Return whether each row sees all keys, as one row of the last place does."""
    if rule.left is not None:
        return False
    return rule.right is None or block.offset + rule.right >= keys - 1


def _mask(q: torch.Tensor, k: torch.Tensor, rule: Rule, block: _Block) -> torch.Tensor | None:
    """Return a block's mask for torch's attention; None if each row sees all keys, unbiased."""
    distance = _distance(q, k, block)
    seen = _visible(distance, rule)
    bias = _bias(q, distance, rule, block)
    if seen is None or bias is None:
        return seen if bias is None else bias
    return bias.masked_fill(~seen, -math.inf)


def _own(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, block: _Block, *, weights: bool
) -> Attended:
    """Compute a block with its scores: in float32 or wider, rounded once."""
    wide = wide_dtype(q.dtype)
    groups = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    rows, keys, values = (each.transpose(1, 2).to(wide) for each in (q, k, v))
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = rows @ keys.transpose(-1, -2) * scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    distance = _distance(q, k, block)
    bias = _bias(q, distance, rule, block)
    seen = _visible(distance, rule)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    sums = torch.logsumexp(scores, -1)
    found = torch.exp(scores - sums[..., None])
    kept, signed = found, found
    if rule.dropout:
        left_out = torch.rand_like(found) < rule.dropout
        kept = found.masked_fill(left_out, 0.0) / (1 - rule.dropout)
        signed = torch.where(left_out, -found, found)
    out = (kept @ values).transpose(1, 2).to(q.dtype)
    around = (block.first, block.keys - block.last)
    every = functional.pad(signed, around).detach().to(q.dtype) if weights else None
    return Attended(out, sums.detach(), every)
