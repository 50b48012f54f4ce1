"""``causal_conv1d``: a short convolution per channel along time, blind to later values."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

from torchdevice.packages.kernel_refusals import check_convolution, check_update_of_convolution
from torchdevice.packages.registry import stands_in, wide_dtype, widened, without_autocast

_ACTIVATIONS = (None, "silu", "swish")

_MODULE = "causal_conv1d.causal_conv1d_interface"


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    padding: int = 0,
    length: int | None = None,
) -> torch.Tensor:
    """Return the convolution of x, with zeros before it and after it, in float32 or wider.

    Args:
        x: (batch, channels, values).
        weight: (channels, width).
        bias: (channels,).
        activation: None, or "silu".
        padding: How many zeros there are at each end.
        length: How many of the results are returned, from the first on. Default: all.
    """
    if activation not in _ACTIVATIONS:
        raise NotImplementedError(
            f"activation={activation!r} is not known. Use None, 'silu' or 'swish'."
        )
    x, weight, bias = widened(x, weight, bias)
    with without_autocast(x):
        out = functional.conv1d(x, weight[:, None], bias, padding=padding, groups=len(weight))
    if length is not None:
        out = out[..., :length]
    return functional.silu(out) if activation else out


@stands_in(f"causal_conv1d.causal_conv1d_fn {_MODULE}.causal_conv1d_fn")
def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Return the convolution of x with what came before.

    Args:
        x: (batch, channels, length).
        weight: (channels, width), of which the last is for the current value.
        bias: (channels,).
        seq_idx: Which sequence each value belongs to: (batch, length). No value sees those of
            another.
        initial_states: What came before: (batch, channels, width - 1). Default: zeros.
        return_final_states: Whether to return the last width - 1 values too.
        final_states_out: Where to write them.
        activation: None, or "silu".
    """
    check_convolution(x, weight, bias, seq_idx, initial_states, return_final_states)
    return of_channels(
        x, weight, bias, seq_idx, initial_states, return_final_states, final_states_out, activation
    )


def of_channels(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """``causal_conv1d_fn`` for every dtype and layout: blocks call it, which copy the tensors that
    the function refuses.
    """
    width, length = weight.shape[1], x.shape[2]
    if initial_states is None and seq_idx is None and not return_final_states:
        # The convolution pads with zeros by itself. Its results beyond the end are left out.
        return convolved(x, weight, bias, activation, width - 1, length).to(x.dtype)
    if initial_states is None:
        before = x.new_zeros(*x.shape[:2], width - 1)
    else:
        before = initial_states.to(x.dtype)
    whole = torch.cat([before, x], 2)
    if seq_idx is None:
        out = convolved(whole, weight, bias, activation)
    else:
        if initial_states is not None or return_final_states:
            raise ValueError("seq_idx is given with states. Use one of the two.")
        out = _of_sequences(whole, weight, bias, seq_idx, activation)
    if not return_final_states:
        return out.to(x.dtype)
    final = whole[:, :, x.shape[2] :]
    return out.to(x.dtype), final.clone() if final_states_out is None else final_states_out.copy_(
        final
    )


def _of_sequences(
    whole: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    index: torch.Tensor,
    activation: str | None,
) -> torch.Tensor:
    """Return the convolution, of which each value takes only those of its own sequence."""
    batch, channels, _ = whole.shape
    width, length = weight.shape[1], index.shape[1]
    # In float32: a value is in `width` windows, whose gradients are summed before rounding.
    wide = whole.to(wide_dtype(whole.dtype))
    windows = wide.unfold(2, width, 1)  # (batch, channels, length, width)
    earlier = functional.pad(index, (width - 1, 0), value=-1).unfold(1, width, 1)
    same = (earlier == index[..., None])[:, None]
    kept = windows.masked_fill(~same, 0).transpose(1, 2).reshape(batch * length, channels, width)
    return (
        convolved(kept, weight, bias, activation).reshape(batch, length, channels).transpose(1, 2)
    )


@stands_in(f"causal_conv1d.causal_conv1d_update {_MODULE}.causal_conv1d_update")
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the convolution of new values with the last ones; the state gets them in place.

    Args:
        x: (batch, channels), or (batch, channels, new values).
        conv_state: (batch of the states, channels, kept values), of which there are width - 1 or
            more.
        weight: (channels, width).
        bias: (channels,).
        activation: None, or "silu".
        cache_seqlens: How many values came before, where the state is a ring: (batch,).
        conv_state_indices: Which state each of the batch has: (batch,).
    """
    new = x[..., None] if x.dim() == 2 else x
    check_update_of_convolution(new, conv_state, weight, bias, cache_seqlens, conv_state_indices)
    width, kept = weight.shape[1], conv_state.shape[2]
    if conv_state_indices is None:
        rows = torch.arange(len(new), device=x.device)
    else:
        rows = conv_state_indices.long()
    state = conv_state[rows]
    if cache_seqlens is None:
        whole = torch.cat([state, new.to(state.dtype)], 2)
        conv_state[rows] = whole[:, :, -kept:]
    else:
        at = cache_seqlens.long()[:, None]
        before = (at + torch.arange(1 - width, 0, device=x.device)) % kept
        earlier = state.gather(2, before[:, None].expand(-1, state.shape[1], -1))
        whole = torch.cat([earlier, new.to(state.dtype)], 2)
        after = (at + torch.arange(new.shape[2], device=x.device)) % kept
        conv_state[rows] = state.scatter(
            2, after[:, None].expand(-1, state.shape[1], -1), new.to(state.dtype)
        )
    first = whole.shape[2] - new.shape[2] - width + 1
    seen = whole[:, :, first:].to(x.dtype)
    out = convolved(seen, weight, bias, activation).to(x.dtype)
    return out[..., 0] if x.dim() == 2 else out


@stands_in("causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states")
def causal_conv1d_varlen_states(
    x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int
) -> torch.Tensor:
    """Return the last values per sequence of (all values, channels): (sequences, channels, length).

    A sequence shorter than ``state_len`` is filled with 0. It has no gradients, as the package's.
    """
    with torch.no_grad():
        parts = (
            x[max(start, stop - state_len) : stop].T
            for start, stop in itertools.pairwise(cu_seqlens.tolist())
        )
        return torch.stack([functional.pad(part, (state_len - part.shape[1], 0)) for part in parts])
