"""Mamba2's state space, with one decay per head and step (arXiv 2405.21060, section 6).

Within a chunk the output is an attention without a softmax, and between chunks a state is handed
on. Chunks are computed again for the backward pass, so memory is linear in the length.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchdevice.packages.causal_convolution import of_channels
from torchdevice.packages.gated_normalization import gated
from torchdevice.packages.normalization import Way
from torchdevice.packages.registry import (
    computes_again,
    on_simulated_gpu,
    stands_in,
    wide_dtype,
    without_autocast,
)

_MODULE = "mamba_ssm.ops.triton.ssd_combined"

_Limits = tuple[float, float]

_NO_LIMITS = (0.0, math.inf)


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """A batch of sequences, in float32 or wider.

    Attributes:
        x: (batch, length, heads, size of a head).
        dt: The size of each step: (batch, length, heads).
        a: The logarithm of the decay of a step of size 1: (heads,).
        b: (batch, length, groups, size of the state).
        c: As ``b``.
        index: Which sequence each value belongs to, or None: (batch, length).
    """

    x: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    index: torch.Tensor | None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors in the order of the attributes."""
        return self.x, self.dt, self.a, self.b, self.c, self.index

    def part(self, start: int, stop: int) -> _Sequence:
        """Return the values from one place to another."""
        x, dt, b, c = (each[:, start:stop] for each in (self.x, self.dt, self.b, self.c))
        return _Sequence(
            x, dt, self.a, b, c, None if self.index is None else self.index[:, start:stop]
        )


def _chunk(
    state: torch.Tensor, before: torch.Tensor | None, *given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a chunk, and the state after it.

    Args:
        state: (batch, heads, size of a head, size of the state).
        before: The sequence that the state belongs to: (batch,).
        given: The tensors of a :class:`_Sequence`.
    """
    chunk = _Sequence(*given)  # type: ignore[arg-type]
    length, heads = chunk.x.shape[1:3]
    groups = chunk.b.shape[2]
    decayed = torch.cumsum(chunk.dt * chunk.a, 1).transpose(1, 2)  # (batch, heads, length)
    seen = torch.ones(length, length, dtype=torch.bool, device=state.device).tril()
    left = decayed.exp()
    kept = decayed[..., -1:].sub(decayed).exp()
    if chunk.index is not None and before is not None:
        seen = (seen & (chunk.index[:, :, None] == chunk.index[:, None]))[:, None]
        left = left * (chunk.index == before[:, None])[:, None]
        kept = kept * (chunk.index == chunk.index[:, -1:])[:, None]
    # Before the exponential, which would overflow above the diagonal.
    decay = (decayed[..., :, None] - decayed[..., None, :]).masked_fill(~seen, -math.inf).exp()
    scores = (
        torch.einsum("bign,bjgn->bgij", chunk.c, chunk.b).repeat_interleave(heads // groups, 1)
        * decay
    )
    moved = chunk.x * chunk.dt[..., None]
    b, c = (each.repeat_interleave(heads // groups, 2) for each in (chunk.b, chunk.c))
    out = torch.einsum("bhij,bjhp->bihp", scores, moved)
    out = out + torch.einsum("bihn,bhpn,bhi->bihp", c, state, left)
    added = torch.einsum("bjhp,bjhn,bhj->bhpn", moved, b, kept)
    return out, state * left[..., -1, None, None] + added


def _scan(
    given: _Sequence, state: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (batch, length, heads, head size), and the state after the last step."""
    length = given.x.shape[1]
    again = length > chunk_size and computes_again(*given.tensors(), state)
    before = None if given.index is None else torch.zeros_like(given.index[:, 0])
    parts = []
    with without_autocast(given.x):
        for start in range(0, length, chunk_size):
            chunk = given.part(start, start + chunk_size)
            every: Any = (state, before, *chunk.tensors())
            out, state = (
                checkpoint(_chunk, *every, use_reentrant=False) if again else _chunk(*every)
            )
            before = None if chunk.index is None else chunk.index[:, -1]
            parts.append(out)
    return torch.cat(parts, 1) if parts else torch.zeros_like(given.x), state


def _check(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> None:
    """Check the shapes, as the package does.

    Raises:
        AssertionError: They do not fit.
    """
    batch, length, heads, _ = x.shape
    fitting = (
        B.dim() == 4
        and B.shape[:2] == (batch, length)
        and C.shape == B.shape
        and heads % B.shape[2] == 0
    )
    if not fitting or dt.shape != (batch, length, heads) or A.shape != (heads,):
        shapes = ", ".join(str(tuple(each.shape)) for each in (x, dt, A, B, C))
        raise AssertionError(
            f"x, dt, A, B and C have the shapes {shapes}. Use (batch, length, heads, size), "
            "(batch, length, heads), (heads,) and twice (batch, length, groups, state), with a "
            "number of groups that divides the heads."
        )


def _steps(
    dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool, limits: _Limits
) -> torch.Tensor:
    steps = dt if bias is None else dt + bias.to(dt.dtype)
    steps = functional.softplus(steps) if softplus else steps
    return steps if tuple(limits) == _NO_LIMITS else steps.clamp(*limits)


@stands_in(f"{_MODULE}.mamba_chunk_scan_combined")
def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: _Limits = _NO_LIMITS,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Return the output of the state space for a sequence.

    Args:
        x: (batch, length, heads, size of a head).
        dt: The size of each step: (batch, length, heads).
        A: (heads,).
        B: (batch, length, groups, size of the state).
        C: As ``B``.
        chunk_size: How many steps are computed at once.
        D: (heads,) or (heads, size of a head).
        z: As x.
        dt_bias: (heads,).
        initial_states: (batch, heads, size of a head, size of the state), which sequence 0 of
            ``seq_idx`` begins with.
        seq_idx: Which sequence each value belongs to: (batch, length). No value sees those of
            another.
        cu_seqlens: Where each sequence begins, and the end of the last, for
            ``return_varlen_states``.
        dt_softplus: Whether the steps are the softplus of ``dt``.
        dt_limit: The smallest step and the largest.
        return_final_states: Whether to return the state after the last step too.
        return_varlen_states: Whether to return the state after each sequence of a batch of 1 too,
            without gradients: (sequences, heads, size of a head, size of the state).
    """
    _check(x, dt, A, B, C)
    wide = wide_dtype(x.dtype)
    steps = _steps(dt.to(wide), dt_bias, dt_softplus, dt_limit)
    given = _Sequence(x.to(wide), steps, A.to(wide), B.to(wide), C.to(wide), seq_idx)
    batch, _, heads, size = x.shape
    state = x.new_zeros(batch, heads, size, B.shape[3], dtype=wide)
    out, final = _scan(
        given, state if initial_states is None else initial_states.to(wide), chunk_size
    )
    if D is not None:
        out = out + given.x * (D.to(wide)[:, None] if D.dim() == 1 else D.to(wide))
    if z is not None:
        out = out * functional.silu(z.to(wide))
    found = [out.to(x.dtype)]
    found += [final] if return_final_states else []
    found += (
        [_states_of_sequences(given, state, cu_seqlens, chunk_size)] if return_varlen_states else []
    )
    return tuple(found) if len(found) > 1 else found[0]


def _states_of_sequences(
    given: _Sequence, state: torch.Tensor, bounds: torch.Tensor | None, chunk_size: int
) -> torch.Tensor:
    """Return the state after each sequence of a batch of 1."""
    if bounds is None:
        raise AssertionError("cu_seqlens must be provided if return_varlen_states is True")
    if given.x.shape[0] != 1:
        raise AssertionError(
            "passing cu_seqlens to get the varlen states is only supported if batch dimension is 1"
        )
    whole = dataclasses.replace(given, index=None)
    with torch.no_grad():
        pairs = itertools.pairwise(bounds.tolist())
        return torch.cat(
            [_scan(whole.part(start, stop), state, chunk_size)[1] for start, stop in pairs]
        )


@stands_in(f"{_MODULE}.mamba_split_conv1d_scan_combined")
def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: _Limits = _NO_LIMITS,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Return the output of a block of Mamba2 from its projected input.

    Args:
        zxbcdt: (batch, length, ...): two parts of a gated layer beside the state space, if there is
            one, then the gate z, the values x, B, C and the step of each head.
        conv1d_weight: (channels of x, B and C, width).
        conv1d_bias: (channels of x, B and C,).
        dt_bias: (heads,).
        A: (heads,).
        D: (heads,), or (heads, size of a head).
        chunk_size: How many steps are computed at once.
        initial_states: (batch, heads, size of a head, size of the state).
        seq_idx: Which sequence each value belongs to: (batch, length).
        dt_limit: The smallest step and the largest.
        return_final_states: Whether to return the state after the last step too.
        activation: None, or "silu".
        rmsnorm_weight: The weight of the normalization with the gate z. Without it z gates the
            output.
        rmsnorm_eps: Its epsilon.
        outproj_weight: (size of the output, heads * size of a head).
        outproj_bias: (size of the output,).
        headdim: The size of a head, where ``D`` does not have it.
        ngroups: How many groups B and C have.
        norm_before_gate: Whether the gate comes after the normalization.
    """
    if D.dim() == 1 and headdim is None:
        raise AssertionError("D has one dimension, and headdim is not given.")
    heads = D.shape[0]
    size = D.shape[1] if headdim is None else headdim
    dim = heads * size
    channels = conv1d_weight.shape[0]
    beside = zxbcdt.shape[-1] - dim - channels - heads
    if beside < 0:
        raise AssertionError(
            f"zxbcdt has {zxbcdt.shape[-1]} channels. Use {dim + channels + heads}, or more."
        )
    other, z, conv, dt = zxbcdt.split([beside, dim, channels, heads], -1)
    if on_simulated_gpu() and channels % 8:
        raise AssertionError("Number of convolution channels is required to be a multiple of 8.")
    conv = of_channels(
        conv.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation
    )
    x, b, c = conv.transpose(1, 2).split([dim, (channels - dim) // 2, (channels - dim) // 2], -1)
    b, c = (each.unflatten(-1, (ngroups, -1)) for each in (b, c))
    gate = z.unflatten(-1, (heads, size)) if rmsnorm_weight is None else None
    scan: Any = mamba_chunk_scan_combined
    out, final = scan.__wrapped__(
        x.unflatten(-1, (heads, size)),
        dt,
        A,
        b,
        c,
        chunk_size,
        D,
        gate,
        dt_bias,
        initial_states,
        seq_idx,
        None,
        True,
        dt_limit,
        True,
    )
    out = out.flatten(-2)
    if rmsnorm_weight is not None:
        out = gated(
            out, rmsnorm_weight, None, z, Way(rmsnorm_eps, True), dim // ngroups, norm_before_gate
        )
    if beside:
        values, linear = other.chunk(2, -1)
        out = torch.cat([functional.silu(values) * linear, out], -1)
    if outproj_weight is not None:
        out = functional.linear(out, outproj_weight, outproj_bias)
    return (out, final) if return_final_states else out
