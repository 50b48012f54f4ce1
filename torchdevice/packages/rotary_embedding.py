"""``flash_attn.layers.rotary``: rotary position embeddings of the first part of each head.

A pair (a, b) of a head at position p becomes ``(a cos - b sin, a sin + b cos)``, with the cosine
and the sine of p and of the pair. With ``interleaved`` neighbours are pairs, and otherwise the
first half and the second (RoFormer, arXiv 2104.09864).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchdevice.kernel.thread_state import refuse
from torchdevice.packages.registry import has, stands_in, unseen, widened

_MODULE = "flash_attn.layers.rotary"


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Return x (..., rows, heads, size) rotated by cos and sin (..., rows, half the rotated size).

    It is computed in float32 or wider, and rounded once.
    """
    with unseen():
        half = cos.shape[-1]
        size = x.shape[-1]
        dtype = x.dtype
    if 2 * half > size:
        raise RuntimeError(f"cos and sin rotate {2 * half} places of a head, and x has {size}.")
    part = x if 2 * half == size else x[..., : 2 * half]
    with unseen():
        cos, sin = cos[..., None, :], sin[..., None, :]
    part, cos, sin = widened(part, cos, sin)
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
        turned = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
        found = torch.stack(turned, -1).flatten(-2)
    else:
        a, b = part.chunk(2, -1)
        # With whole heads, which are contiguous: tables are smaller.
        whole_cos, whole_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        found = torch.addcmul(part * whole_cos, torch.cat((b, a), -1), whole_sin)
    found = found if dtype is part.dtype else found.to(dtype)
    return found if 2 * half == size else torch.cat([found, x[..., 2 * half :]], -1)


def _of_rows(
    table: torch.Tensor, x: torch.Tensor, offsets: int | torch.Tensor, bounds: torch.Tensor | None
) -> Any:
    """Return the rows of a table of cosines or sines that belong to the rows of x."""
    if bounds is not None:
        starts = bounds[:-1].long()
        lengths = bounds.diff().long()
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths)
        offset = offsets[sequence] if isinstance(offsets, torch.Tensor) else offsets
        return table[rows - starts[sequence] + offset]
    if isinstance(offsets, int):
        with unseen():
            positions, needed = len(table), x.shape[1]
        if offsets == 0 and positions == needed:
            return table
        return table[offsets : offsets + needed]
    return table[offsets[:, None].long() + torch.arange(x.shape[1], device=x.device)]


class _InPlace(torch.autograd.Function):
    """Rotates parts of a tensor in place, also if the program wants its gradient.

    The gradient is rotated back. The tables have none, as in the package.
    """

    @staticmethod
    def forward(
        x: torch.Tensor, places: tuple[int | slice, ...], interleaved: bool, *tables: torch.Tensor
    ) -> Any:
        """Rotate ``x[:, :, place]`` of each place by a table of cosines and one of sines."""
        for place, cos, sin in zip(places, tables[::2], tables[1::2], strict=True):
            part = x[:, :, place]
            part.copy_(rotated(part, cos, sin, interleaved))
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.places, ctx.interleaved, *tables = inputs
        ctx.save_for_backward(*tables)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found, tables = grads[0].clone(), ctx.saved_tensors
        for place, cos, sin in zip(ctx.places, tables[::2], tables[1::2], strict=True):
            part = found[:, :, place]
            part.copy_(rotated(part, cos, -sin, ctx.interleaved))
        return found, None, None, *(None for _ in tables)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        x: torch.Tensor,
        places: tuple[int | slice, ...],
        interleaved: bool,
        *tables: torch.Tensor,
    ) -> Any:
        """Rotate one element of the mapped dimension after the other.

        Raises:
            RuntimeError: Only the tables are mapped, so there is no place for all results.
        """
        mapped, of_tables = in_dims[0], in_dims[3:]
        if mapped is None:
            raise RuntimeError(
                "vmap: a tensor that is not mapped cannot be rotated in place by tables that are. "
                "Map it too, or rotate it with inplace=False."
            )
        results = []
        for index in range(info.batch_size):
            alone = [
                table if dim is None else table.select(dim, index)
                for table, dim in zip(tables, of_tables, strict=True)
            ]
            results.append(_InPlace.apply(x.select(mapped, index), places, interleaved, *alone))
        return torch.stack(results, mapped), mapped


_ALL = (slice(None),)


@stands_in(f"{_MODULE}.apply_rotary_emb")
def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Return x with rotated heads.

    Args:
        x: (batch, rows, heads, size), or (rows of all sequences, heads, size) with ``cu_seqlens``.
        cos: (positions, half of the rotated size).
        sin: As ``cos``.
        interleaved: Whether pairs are neighbours.
        inplace: Whether x is written to and returned.
        seqlen_offsets: The position of the first row: an int, or one for each sequence.
        cu_seqlens: Where each sequence begins, and the end of the last.
        max_seqlen: Not needed here.
    """
    cos, sin = (_of_rows(table, x, seqlen_offsets, cu_seqlens) for table in (cos, sin))
    if inplace:
        return _InPlace.apply(x, _ALL, interleaved, cos, sin)
    return rotated(x, cos, sin, interleaved)


has(f"{_MODULE}.apply_rotary_emb_func", apply_rotary_emb)


@stands_in("flash_attn.ops.triton.rotary.apply_rotary")
def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """Return x with rotated heads, without gradients.

    Args:
        x: As in :func:`apply_rotary_emb`, and so are the others.
        conjugate: Whether heads are rotated back.
    """
    with torch.no_grad():
        cos, sin = (_of_rows(table, x, seqlen_offsets, cu_seqlens) for table in (cos, sin))
        found = rotated(x, cos, -sin if conjugate else sin, interleaved)
        return x.copy_(found) if inplace else found


@stands_in(f"{_MODULE}.apply_rotary_emb_torch")
def apply_rotary_emb_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Return x (batch, rows, heads, size) with rotated heads, for as many positions as cos has."""
    return rotated(x, cos, sin, interleaved)


@stands_in(f"{_MODULE}.rotate_half")
def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Return x with each pair (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


@stands_in(f"{_MODULE}.apply_rotary_emb_qkv_")
def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotate queries and keys in place, and return the tensor.

    Args:
        qkv: (batch, rows, 3, heads, size); with ``num_heads_q`` (batch, rows, heads of all three,
            size).
        cos: (positions, half of the rotated size).
        sin: As ``cos``.
        cos_k: The table of the keys, where it is another.
        sin_k: As ``cos_k``.
        interleaved: Whether pairs are neighbours.
        seqlen_offsets: The position of the first row.
        num_heads_q: The number of heads of the queries, where keys and values have fewer.
    """
    places: tuple[int | slice, ...] = (0, 1)
    if qkv.dim() != 5:
        if num_heads_q is None:
            raise RuntimeError(
                "qkv has 4 dimensions. Give num_heads_q, or use (batch, rows, 3, heads, size)."
            )
        heads = (qkv.shape[2] - num_heads_q) // 2
        places = slice(0, num_heads_q), slice(num_heads_q, num_heads_q + heads)
    tables = cos, sin, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    rows = [_of_rows(table, qkv, seqlen_offsets, None) for table in tables]
    return _InPlace.apply(qkv, places, interleaved, *rows)


@stands_in(f"{_MODULE}.apply_rotary_emb_kv_")
def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Rotate the keys of (batch, rows, 2, heads, size) in place, and return the tensor."""
    cos, sin = (_of_rows(table, kv, seqlen_offsets, None) for table in (cos, sin))
    return _InPlace.apply(kv, (0,), interleaved, cos, sin)


@stands_in(f"{_MODULE}.RotaryEmbedding")
class RotaryEmbedding(nn.Module):
    """Rotates queries and keys of a module's input, by tables that grow with the positions.

    Args:
        dim: The rotated size of a head.
        base: The angle of pair i at position p is ``p * base ** (-2 i / dim)``.
        interleaved: Whether pairs are neighbours.
        scale_base: The scaling of XPos, which is not stood in for.
        pos_idx_in_fp32: Whether positions are multiplied in float32 also in a module of half
            precision.
        device: Where the tables are.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__()
        if scale_base is not None:
            refuse(
                f"{_MODULE}.RotaryEmbedding(scale_base=...)",
                "Leave scale_base out, or scale queries and keys yourself.",
            )
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def _frequencies(self, device: Any) -> torch.Tensor:
        return self.base ** -(
            torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        )

    def _up_to(self, positions: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for that many positions, in a tensor's dtype and device."""
        tables = self._tables
        known = tables is not None and len(tables[0]) >= positions
        fits = known and tables[0].device == like.device and tables[0].dtype == like.dtype  # type: ignore[index]
        if not fits:
            # Tables made in inference mode could not be saved for a backward pass.
            with torch.inference_mode(False):
                self._tables = self._made(positions, like)
        return self._tables  # type: ignore[return-value]

    def _made(self, positions: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float32 if self.pos_idx_in_fp32 else self.inv_freq.dtype
        if self.pos_idx_in_fp32:
            frequencies = self._frequencies(like.device)
        else:
            frequencies = self.inv_freq.to(like.device)
        angles = torch.outer(torch.arange(positions, device=like.device, dtype=dtype), frequencies)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: int | torch.Tensor = 0,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """Rotate qkv (batch, rows, 3, heads, size) in place; or rotate and return q and kv."""
        if cu_seqlens is not None:
            refuse(
                f"{_MODULE}.RotaryEmbedding(cu_seqlens=...)",
                "Call apply_rotary_emb with cu_seqlens for q and for k.",
            )
        rows = qkv.shape[1] if kv is None else max(qkv.shape[1], kv.shape[1])
        if max_seqlen is not None:
            last = max_seqlen
        elif isinstance(seqlen_offset, torch.Tensor):
            last = rows + int(seqlen_offset.max())
        else:
            last = rows + seqlen_offset
        cos, sin = self._up_to(last, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, None, None, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)
