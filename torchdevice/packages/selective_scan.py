"""Mamba's state space: ``h = exp(dt A) h + dt B u``, ``y = C h + D u`` (arXiv 2312.00752).

A sequence is computed in chunks, and each again for the backward pass, so that the states of one
chunk are kept at a time. Memory is linear in the length, without the size of the state as a factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchdevice.packages.kernel_refusals import check_scan, check_step
from torchdevice.packages.registry import computes_again, stands_in, wide_dtype

_CHUNK = 64
"""How many steps are computed, and computed again for gradients, at once."""

_MODULE = "mamba_ssm.ops.selective_scan_interface"


def _chunk(
    state: torch.Tensor,
    u: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a chunk (batch, channels, steps), and the state after it.

    Args:
        state: (batch, channels, size).
        u: (batch, channels, steps).
        dt: (batch, channels, steps).
        a: (channels, size).
        b: (batch, channels, steps, size).
        c: (batch, channels, steps, size).
    """
    # Steps come first, so that each is contiguous.
    size = dt.permute(2, 0, 1).contiguous()
    move = u.permute(2, 0, 1).contiguous()
    decays = torch.exp(size[..., None] * a).unbind()
    added = ((size * move)[..., None] * b.permute(2, 0, 1, 3)).unbind()
    states = []
    # One operator a step. Scanning by doubling has fewer, and moves several times as much memory.
    for decay, more in zip(decays, added, strict=True):
        state = torch.addcmul(more, decay, state)
        states.append(state)
    out = (torch.stack(states) * c.permute(2, 0, 1, 3)).sum(-1)
    return out.permute(1, 2, 0), state


def _by_step(given: torch.Tensor) -> torch.Tensor:
    """Return B or C as (batch or 1, channels or groups, length or 1, size)."""
    if given.dim() == 2:
        return given[None, :, None]
    grouped = given[:, None] if given.dim() == 3 else given
    return grouped.transpose(2, 3)


def _of_chunk(given: torch.Tensor, start: int, stop: int, channels: int) -> torch.Tensor:
    part = given if given.shape[2] == 1 else given[:, :, start:stop]
    return part.repeat_interleave(channels // part.shape[1], 1) if part.shape[1] > 1 else part


@stands_in(f"{_MODULE}.selective_scan_fn mamba_ssm.selective_scan_fn")
def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Return the output of the state space for a sequence.

    Args:
        u: (batch, channels, length).
        delta: The size of each step: (batch, channels, length).
        A: (channels, size), real or complex.
        B: (channels, size), (batch, size, length), or (batch, groups, size, length).
        C: As ``B``.
        D: (channels,).
        z: (batch, channels, length).
        delta_bias: (channels,).
        delta_softplus: Whether the steps are the softplus of ``delta``.
        return_last_state: Whether to return the state after the last step too: (batch, channels,
            size).
    """
    check_scan(u, delta, A, B, C, D, z, delta_bias)
    return scanned(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def scanned(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """``selective_scan_fn`` for every dtype.

    Blocks of Mamba use it too.
    """
    wide = wide_dtype(u.dtype)
    if torch.is_complex(A):
        return _complex(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)
    dt = _steps(delta, delta_bias, delta_softplus, wide)
    b = _by_step(B).to(wide)
    c = _by_step(C).to(wide)
    out, state = _scan(u.to(wide), dt, A.to(wide), b, c)
    return _gated(out, u, D, z, state, return_last_state)


# The package's reference takes every dtype too. Many programs import it beside the function.
stands_in(f"{_MODULE}.selective_scan_ref")(scanned)


def _steps(
    delta: torch.Tensor, bias: torch.Tensor | None, softplus: bool, wide: torch.dtype
) -> torch.Tensor:
    dt = delta.to(wide)
    if bias is not None:
        dt = dt + bias.to(wide)[:, None]
    return functional.softplus(dt) if softplus else dt


def _scan(
    u: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, channels, length = u.shape
    state = torch.zeros(batch, channels, a.shape[1], dtype=a.dtype, device=u.device)
    again = length > _CHUNK and computes_again(u, dt, a, b, c)
    parts = []
    for start in range(0, length, _CHUNK):
        stop = min(start + _CHUNK, length)
        given = [state, u[:, :, start:stop], dt[:, :, start:stop], a]
        given += [_of_chunk(each, start, stop, channels) for each in (b, c)]
        out, state = checkpoint(_chunk, *given, use_reentrant=False) if again else _chunk(*given)
        parts.append(out)
    return torch.cat(parts, 2) if parts else torch.zeros_like(u), state


def _gated(
    out: torch.Tensor,
    u: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    state: torch.Tensor,
    asked: bool,
) -> Any:
    if d is not None:
        out = out + u.to(out.dtype) * d.to(out.dtype)[:, None]
    if z is not None:
        out = out * functional.silu(z.to(out.dtype))
    return (out.to(u.dtype), state) if asked else out.to(u.dtype)


def _complex(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    return_last_state: bool,
) -> Any:
    """Compute a complex state: B and C are pairs of real numbers, y is twice the real part."""
    wide = wide_dtype(u.dtype)
    b, c = (each if each.is_complex() else _from_pairs(each.to(wide)) for each in (B, C))
    dt = _steps(delta, delta_bias, delta_softplus, wide)
    complex_u = u.to(wide).to(A.dtype)
    out, state = _scan(
        complex_u, dt.to(A.dtype), A, _by_step(b).to(A.dtype), _by_step(c).to(A.dtype)
    )
    return _gated(2 * out.real, u, D, z, state, return_last_state)


def _from_pairs(given: torch.Tensor) -> torch.Tensor:
    """Return (..., length) complex numbers from (..., 2 length) real ones, which are neighbours."""
    return torch.view_as_complex(given.unflatten(-1, (-1, 2)).contiguous())


@stands_in("mamba_ssm.ops.triton.selective_state_update.selective_state_update")
def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of one step, and write the state after it in place.

    Args:
        state: (batch, channels, size), or (batch, heads, channels of a head, size).
        x: As ``state``, without its last dimension.
        dt: As ``x``.
        A: As ``state``, without its first dimension.
        B: (batch, size); with heads (batch, groups, size).
        C: As ``B``.
        D: As ``A``, without its last dimension.
        z: As ``x``.
        dt_bias: As ``D``.
        dt_softplus: Whether the steps are the softplus of ``dt``.
        state_batch_indices: Which state each of the batch has: (batch,).
    """
    check_step(state, x, dt, A, B, C)
    wide = wide_dtype(x.dtype)
    rows = slice(None) if state_batch_indices is None else state_batch_indices.long()
    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    step = functional.softplus(step) if dt_softplus else step
    b, c = (_of_heads(each.to(wide), x) for each in (B, C))
    after = (
        state[rows].to(wide) * torch.exp(step[..., None] * A.to(wide))
        + (step * x.to(wide))[..., None] * b
    )
    state[rows] = after.to(state.dtype)
    out = (after * c).sum(-1)
    if D is not None:
        out = out + x.to(wide) * D.to(wide)
    if z is not None:
        out = out * functional.silu(z.to(wide))
    return out.to(x.dtype)


def _of_heads(given: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a step's B or C, to multiply (batch, channels, size) or (batch, heads, ..., size)."""
    if given.dim() == 3:
        return given.repeat_interleave(x.shape[1] // given.shape[1], 1)[:, :, None]
    return given[:, None]
