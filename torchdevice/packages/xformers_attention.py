"""``xformers.ops``: memory-efficient attention, and the biases that choose the keys of a row.

Tensors have the shape (batch, rows, heads, size), or (batch, rows, size) for one head, or (batch,
rows, groups, heads of a group, size).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from torchdevice.kernel.devices.runtime import HALF
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.packages import attention
from torchdevice.packages.attention import Attended, Rule
from torchdevice.packages.kernel_refusals import check_attention
from torchdevice.packages.registry import has, report, stands_in

_BIASES = "xformers.ops.fmha.attn_bias"

_Bias = TypeVar("_Bias", bound="AttentionBias")


# ---- biases --------------------------------------------------------------------------------------


def _names(name: str) -> str:
    return f"{_BIASES}.{name} xformers.ops.fmha.{name}"


@stands_in(f"{_names('AttentionBias')} xformers.ops.AttentionBias")
class AttentionBias:
    """A bias of the scores of attention: minus infinity where a row does not see a key."""

    def rule(self, rows: int, keys: int) -> Rule:
        """Return the rule for the keys that a row sees, for so many rows and keys."""
        raise NotImplementedError

    def to(self: _Bias, device: Any) -> _Bias:
        """Return the bias for a device."""
        return self

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        """Return the bias as a tensor of a shape that ends in (rows, keys)."""
        rows, keys = shape[-2:]
        rule = self.rule(rows, keys)
        distance = (
            torch.arange(keys, device=device)
            - (torch.arange(rows, device=device) + keys - rows)[:, None]
        )
        seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
        seen = seen if rule.right is None else seen & (distance <= rule.right)
        seen = seen if rule.left is None else seen & (distance >= -rule.left)
        bias = torch.zeros(rows, keys, dtype=dtype, device=device).masked_fill(~seen, -math.inf)
        bias = bias if rule.bias is None else bias + rule.bias.to(bias)
        return bias.expand(*shape)


@stands_in(f"{_names('LowerTriangularMask')} xformers.ops.LowerTriangularMask")
class LowerTriangularMask(AttentionBias):
    """Row i sees the keys up to i: the first row is aligned with the first key."""

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(right=rows - keys)

    def add_bias(self, bias: torch.Tensor) -> AttentionBias:
        """Return a mask like this one that adds a tensor too."""
        return LowerTriangularMaskWithTensorBias(bias)


@stands_in(_names("LowerTriangularMaskWithTensorBias"))
class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Row i sees the keys up to i, and a tensor is added to the scores."""

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    def to(self, device: Any) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(right=rows - keys, bias=self._bias)


@stands_in(_names("LowerTriangularFromBottomRightMask"))
class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last row is aligned with the last key, and each row sees one key less than the next."""

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(right=0)

    def make_local_attention(self, window_size: int) -> AttentionBias:
        """Return a mask like this one whose rows see only so many keys."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@stands_in(_names("LowerTriangularFromBottomRightLocalAttentionMask"))
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """As its base, and a row sees only the last ``_window_size`` keys, its own among them."""

    def __init__(self, _window_size: int) -> None:
        if _window_size <= 0:
            raise ValueError(
                f"_window_size={_window_size!r} is not a number of keys. Use an int of 1 or more."
            )
        self._window_size = _window_size

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(left=self._window_size - 1, right=0)


@stands_in(_names("LocalAttentionFromBottomRightMask"))
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A row sees ``window_left`` keys before its own and ``window_right`` after it."""

    def __init__(self, window_left: int, window_right: int) -> None:
        if window_left < 0 or window_right < 0:
            raise ValueError(
                f"({window_left!r}, {window_right!r}) are not numbers of keys. Use ints of 0 or "
                "more."
            )
        self.window_left, self.window_right = window_left, window_right

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(left=self.window_left, right=self.window_right)


class _Lengths(NamedTuple):
    """Where sequences begin.

    Attributes:
        seqstart: Where each begins, and the end of the last.
        max_seqlen: The longest length.
        min_seqlen: The shortest length.
        seqstart_py: As ``seqstart``.
    """

    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    def seqlens(self) -> list[int]:
        """Return the lengths."""
        return [stop - start for start, stop in itertools.pairwise(self.seqstart_py)]


def _starts(seqlens: Sequence[int]) -> list[int]:
    """Return where sequences begin, and the end of the last."""
    return list(itertools.accumulate(seqlens, initial=0))


def _lengths(seqlens: Sequence[int]) -> _Lengths:
    starts = _starts(seqlens)
    return _Lengths(
        torch.tensor(starts, dtype=torch.int32),
        max(seqlens, default=-1),
        min(seqlens, default=-1),
        starts,
    )


class _OfSequences(AttentionBias):
    """Sequences in one batch of 1, of which each row sees keys of its own sequence.

    Attributes:
        q_seqlen: The number of rows of each sequence.
        kv_seqlen: The number of keys of each sequence.
    """

    def __init__(self, q_seqlen: Sequence[int], kv_seqlen: Sequence[int]):
        self.q_seqlen, self.kv_seqlen = list(q_seqlen), list(kv_seqlen)

    def rule(self, rows: int, keys: int) -> Rule:
        """Return the rule for the keys that a row of a sequence sees."""
        return Rule()

    @property
    def q_seqinfo(self) -> _Lengths:
        """Where the rows of each sequence begin."""
        return _lengths(self.q_seqlen)

    @property
    def k_seqinfo(self) -> _Lengths:
        """Where the keys of each sequence begin."""
        return _lengths(self.kv_seqlen)

    def span(self) -> int:
        """Return how many keys all sequences have together."""
        return sum(self.kv_seqlen)

    def places(self) -> Iterable[tuple[slice, slice]]:
        """Yield where the rows and the keys of each sequence are."""
        rows, keys = (_starts(each) for each in (self.q_seqlen, self.kv_seqlen))
        for pair in zip(itertools.pairwise(rows), itertools.pairwise(keys), strict=True):
            yield slice(*pair[0]), slice(*pair[1])

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> torch.Tensor:
        bias = torch.full(tuple(shape[-2:]), -math.inf, dtype=dtype, device=device)
        for rows, keys in self.places():
            block = bias[rows, keys]
            of_sequence = AttentionBias.materialize(self, tuple(block.shape), dtype, device)
            bias[rows, keys] = of_sequence
        return bias.expand(*shape)


@stands_in(_names("BlockDiagonalMask"))
class BlockDiagonalMask(_OfSequences):
    """Sequences of different lengths in one batch of 1: a row sees the keys of its own sequence."""

    def __init__(
        self, q_seqinfo: _Lengths, k_seqinfo: _Lengths, _batch_sizes: Sequence[int] | None = None
    ):
        super().__init__(q_seqinfo.seqlens(), k_seqinfo.seqlens())
        self._batch_sizes = _batch_sizes

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> BlockDiagonalMask:
        """Return the mask of sequences with so many rows and keys.

        Raises:
            ValueError: There are not as many sequences of keys as of rows.
        """
        given = list(q_seqlen if kv_seqlen is None else kv_seqlen)
        if len(given) != len(q_seqlen):
            raise ValueError(
                f"there are {len(q_seqlen)} sequences of rows and {len(given)} of keys."
            )
        return cls(_lengths(q_seqlen), _lengths(given))

    @classmethod
    def from_tensor_list(
        cls, tensors: Sequence[torch.Tensor]
    ) -> tuple[BlockDiagonalMask, torch.Tensor]:
        """Return a mask, and tensors (batch, rows, ...) one after the other in a batch of 1."""
        mask, joined, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        return mask, joined

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[torch.Tensor],
        tensors_k: Sequence[torch.Tensor],
        tensors_v: Sequence[torch.Tensor] | None = None,
    ) -> tuple[BlockDiagonalMask, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a mask, and queries, keys and values of (batch, length, ...) each joined."""
        rows, keys = (
            [length for each in tensors for length in [each.shape[1]] * each.shape[0]]
            for tensors in (tensors_q, tensors_k)
        )
        mask = cls(_lengths(rows), _lengths(keys), [each.shape[0] for each in tensors_q])
        values = None if tensors_v is None else _joined(tensors_v)
        return mask, _joined(tensors_q), _joined(tensors_k), values

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that ``from_tensor_list`` joined; without it one for each sequence."""
        return self.split_queries(tensor)

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the queries that ``from_tensor_lists_qkv`` joined."""
        return self._split(tensor, self.q_seqlen)

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys or values that ``from_tensor_lists_qkv`` joined."""
        return self._split(tensor, self.kv_seqlen)

    def _split(self, tensor: torch.Tensor, seqlens: Sequence[int]) -> list[torch.Tensor]:
        if tensor.shape[0] != 1 or tensor.shape[1] != sum(seqlens):
            raise ValueError(
                f"sequences of {sum(seqlens)} in a batch of 1 do not fit {tuple(tensor.shape[:2])}."
            )
        counts = self._batch_sizes or [1] * len(seqlens)
        lengths = iter(seqlens)
        groups = [list(itertools.islice(lengths, count)) for count in counts]
        parts = tensor.split([sum(group) for group in groups], 1)
        return [
            part.reshape(len(group), -1, *tensor.shape[2:])
            for part, group in zip(parts, groups, strict=True)
        ]

    def make_causal(self) -> BlockDiagonalMask:
        """Return a like mask in which rows see keys up to their own, counted from the first."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalMask:
        """Return a mask like this one, in which the last row of a sequence sees its last key."""
        return BlockDiagonalCausalFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        )

    def make_local_attention(self, window_size: int) -> BlockDiagonalMask:
        """Return a causal mask whose rows see only so many keys, counted from the first."""
        return BlockDiagonalCausalLocalAttentionMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )

    def make_local_attention_from_bottomright(self, window_size: int) -> BlockDiagonalMask:
        """Return a like mask in which the last row of a sequence sees its last keys."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.reshape(1, -1, *each.shape[2:]) for each in tensors], 1)


@stands_in(_names("BlockDiagonalCausalMask"))
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Sequences in which row i sees the keys up to i."""

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(right=rows - keys)


@stands_in(_names("BlockDiagonalCausalFromBottomRightMask"))
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Sequences whose last row sees their last key, and each row one key less than the next."""

    def __init__(
        self, q_seqinfo: _Lengths, k_seqinfo: _Lengths, _batch_sizes: Sequence[int] | None = None
    ):
        super().__init__(q_seqinfo, k_seqinfo, _batch_sizes)
        for rows, keys in zip(self.q_seqlen, self.kv_seqlen, strict=True):
            if keys < rows:
                raise ValueError(
                    f"a sequence has {rows} rows and {keys} keys. Give it as many keys or more."
                )

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(right=0)


class _Local(BlockDiagonalMask):
    """Sequences in which a row sees the keys up to its own, and so many at most."""

    def __init__(
        self,
        q_seqinfo: _Lengths,
        k_seqinfo: _Lengths,
        _batch_sizes: Sequence[int] | None = None,
        _window_size: int = 0,
    ):
        super().__init__(q_seqinfo, k_seqinfo, _batch_sizes)
        if _window_size <= 0:
            raise ValueError(
                f"_window_size={_window_size!r} is not a number of keys. Use an int of 1 or more."
            )
        self._window_size = _window_size


@stands_in(_names("BlockDiagonalCausalLocalAttentionMask"))
class BlockDiagonalCausalLocalAttentionMask(_Local):
    """Sequences in which row i sees the last `_window_size` of the keys up to i."""

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(left=self._window_size - 1 + keys - rows, right=rows - keys)


@stands_in(_names("BlockDiagonalCausalLocalAttentionFromBottomRightMask"))
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(_Local):
    """Sequences whose last row sees the last `_window_size` keys, and the rows before it alike."""

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(left=self._window_size - 1, right=0)


@stands_in(_names("BlockDiagonalPaddedKeysMask"))
class BlockDiagonalPaddedKeysMask(_OfSequences):
    """Sequences each of which has room for `kv_padding` keys, and uses the first `kv_seqlen`."""

    def __init__(self, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int]):
        super().__init__(q_seqlen, kv_seqlen)
        self.kv_padding = kv_padding
        if max(self.kv_seqlen, default=0) > kv_padding:
            raise ValueError(
                f"a sequence has {max(self.kv_seqlen)} keys, and room for {kv_padding}."
            )

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Any = None,
    ) -> BlockDiagonalPaddedKeysMask:
        """Return the mask of sequences with so many rows and keys. ``causal_diagonal`` is unused.

        Raises:
            ValueError: There are not as many sequences of keys as of rows.
        """
        if len(kv_seqlen) != len(q_seqlen):
            raise ValueError(
                f"there are {len(q_seqlen)} sequences of rows and {len(kv_seqlen)} of keys."
            )
        return cls(q_seqlen, kv_padding, kv_seqlen)

    def span(self) -> int:
        return self.kv_padding * len(self.kv_seqlen)

    def places(self) -> Iterable[tuple[slice, slice]]:
        starts = range(0, self.span(), self.kv_padding)
        for (rows, _), start, length in zip(super().places(), starts, self.kv_seqlen, strict=True):
            yield rows, slice(start, start + length)


@stands_in(_names("BlockDiagonalCausalWithOffsetPaddedKeysMask"))
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Such sequences whose last row sees the last key, and each row one key less than the next."""

    def rule(self, rows: int, keys: int) -> Rule:
        return Rule(right=0)


# ---- attention -----------------------------------------------------------------------------------


@stands_in("xformers.ops.memory_efficient_attention xformers.ops.fmha.memory_efficient_attention")
def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the attention of queries to keys and values.

    Args:
        query: (batch, rows, heads, size), or see the top of this file.
        key: (batch, keys, heads, size).
        value: (batch, keys, heads, size of the values).
        attn_bias: None, one of the biases, or a tensor that fits (batch, heads, rows, keys).
        p: The probability with which a weight is left out.
        scale: The factor of the scores. Default: the inverse square root of the size.
        op: Which kernels to use. There is one way to compute here, and on simulated GPUs another
            error for what they do not take.
        output_dtype: The dtype of the result. Default: the queries'.
    """
    chosen = isinstance(op, tuple) and op[0] is not None
    out = _attended(query, key, value, attn_bias, p, scale, lse=False, chosen=chosen).out
    return out.reshape(*query.shape[:-1], value.shape[-1]).to(output_dtype or query.dtype)


@stands_in(
    "xformers.ops.memory_efficient_attention_forward "
    "xformers.ops.fmha.memory_efficient_attention_forward"
)
def memory_efficient_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the attention without a way back for gradients."""
    with torch.no_grad():
        chosen = op is not None
        out = _attended(query, key, value, attn_bias, p, scale, lse=False, chosen=chosen).out
    return out.reshape(*query.shape[:-1], value.shape[-1]).to(output_dtype or query.dtype)


@stands_in("xformers.ops.memory_efficient_attention_forward_requires_grad")
def memory_efficient_attention_forward_requires_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the attention, and the logarithms of the sums of exponentials (batch, heads, rows)."""
    with torch.no_grad():
        chosen = op is not None
        found = _attended(query, key, value, attn_bias, p, scale, lse=True, chosen=chosen)
    return found.out.reshape(*query.shape[:-1], value.shape[-1]).to(
        output_dtype or query.dtype
    ), found.lse


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: Any,
    p: float,
    scale: float | None,
    *,
    lse: bool,
    chosen: bool,
) -> Attended:
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4, 5):
        dims = query.dim(), key.dim(), value.dim()
        raise ValueError(
            f"query, key and value have {dims} dimensions. Use 3, 4 or 5 for all of them."
        )
    check_attention(query, key, value, bias, p, chosen=chosen)
    if p:
        report("xformers.ops", "dropout with torch's random numbers", Fidelity.APPROXIMATE)
    q, k, v = (_with_heads(each) for each in (query, key, value))
    if isinstance(bias, _OfSequences):
        return _of_sequences(q, k, v, bias, p, scale, lse=lse)
    rows, keys = q.shape[1], k.shape[1]
    rule = _rule_of(bias, rows, keys, q)
    return attention.attend(
        q, k, v, Rule(scale, rule.left, rule.right, 0.0, None, rule.bias, p), lse=lse
    )


def _with_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as (batch, rows, heads, size)."""
    if tensor.dim() == 3:
        return tensor[:, :, None]
    return tensor.flatten(2, 3) if tensor.dim() == 5 else tensor


def _rule_of(bias: Any, rows: int, keys: int, q: torch.Tensor) -> Rule:
    if bias is None:
        return Rule()
    if isinstance(bias, AttentionBias):
        return bias.rule(rows, keys)
    if not isinstance(bias, torch.Tensor):
        raise ValueError(
            f"attn_bias={bias!r} is neither a tensor nor one of the biases of {_BIASES}."
        )
    if bias.dim() == 3:  # of one head, with the batch first
        bias = bias.unflatten(0, (-1, q.shape[2]))
    return Rule(bias=bias.flatten(1, 2) if bias.dim() == 5 else bias)


def _of_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: _OfSequences,
    p: float,
    scale: float | None,
    *,
    lse: bool,
) -> Attended:
    """Attend within each sequence. No mask of all rows by all keys is made."""
    if q.shape[0] != 1 or sum(mask.q_seqlen) != q.shape[1] or mask.span() > k.shape[1]:
        shapes = tuple(q.shape[:2]), tuple(k.shape[:2])
        raise ValueError(
            f"a mask of sequences with {sum(mask.q_seqlen)} rows and {mask.span()} keys does not "
            f"fit {shapes}. Join the sequences in a batch of 1."
        )
    found = []
    for rows, keys in mask.places():
        given = q[:, rows], k[:, keys], v[:, keys]
        rule = mask.rule(given[0].shape[1], given[1].shape[1])
        found.append(
            attention.attend(*given, Rule(scale, rule.left, rule.right, dropout=p), lse=lse)
        )
    sums = [each.lse for each in found if each.lse is not None]
    return Attended(
        torch.cat([each.out for each in found], 1), torch.cat(sums, 2) if sums else None, None
    )


class _Kernel:
    """A choice of kernels. A program names it in ``op=``, and there is one way to compute here.

    Attributes:
        SUPPORTED_DTYPES: The dtypes that the package's kernels take, which diffusers reads.
    """

    SUPPORTED_DTYPES: set[torch.dtype] = set()


for _name, _dtypes in (
    ("Cutlass", {torch.float32, *HALF}),
    ("FlashAttention", HALF),
    ("TritonSplitK", HALF),
):
    _kernel = type(f"{_name}Op", (_Kernel,), {"SUPPORTED_DTYPES": set(_dtypes)})
    has(f"xformers.ops.MemoryEfficientAttention{_name}Op", (_kernel, _kernel))
has("xformers.ops.AttentionOpBase xformers.ops.AttentionOp xformers.ops.fmha.AttentionOp", _Kernel)


@stands_in("xformers.ops.unbind")
def unbind(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """Return the parts of a tensor along a dimension, as views."""
    return x.unbind(dim)
