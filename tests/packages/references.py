"""The published definitions of what packages compute, as plain loops in float64."""

from __future__ import annotations

import math

import torch


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention (batch, rows, heads, size) and log-sums (batch, heads, rows) by row."""
    batch, rows, heads, size = q.shape
    keys, groups = k.shape[1], heads // k.shape[2]
    factor = 1 / math.sqrt(size) if scale is None else scale
    out, sums = [], []
    for b in range(batch):
        for h in range(heads):
            for i in range(rows):
                seen, scores = [], []
                for j in range(keys):
                    distance = j - (i + keys - rows)
                    hidden = (causal and distance > 0) or (window[1] >= 0 and distance > window[1])
                    if hidden or (window[0] >= 0 and distance < -window[0]):
                        continue
                    score = (q[b, i, h] * k[b, j, h // groups]).sum() * factor
                    if softcap:
                        score = softcap * torch.tanh(score / softcap)
                    if slopes is not None:
                        score = score - slopes.reshape(-1, heads)[
                            b if slopes.dim() == 2 else 0, h
                        ] * abs(distance)
                    if bias is not None:
                        score = score + bias[b, h, i, j]
                    seen.append(j)
                    scores.append(score)
                if not seen:
                    out.append(v.new_zeros(v.shape[-1]))
                    sums.append(v.new_tensor(math.inf))
                    continue
                together = torch.stack(scores)
                weights = torch.exp(together - together.max())
                out.append((weights[:, None] * v[b, seen, h // groups]).sum(0) / weights.sum())
                sums.append(torch.log(weights.sum()) + together.max())
    shape = batch, heads, rows
    return torch.stack(out).reshape(*shape, -1).transpose(1, 2), torch.stack(sums).reshape(shape)


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    """Return each channel's causal convolution, by value, within sequences of an index."""
    batch, channels, length = x.shape
    width = weight.shape[1]
    out = []
    for b in range(batch):
        for t in range(length):
            total = bias
            for tap in range(width):
                source = t - width + 1 + tap
                if source >= 0 and (index is None or index[b, source] == index[b, t]):
                    total = total + weight[:, tap] * x[b, :, source]
            out.append(total)
    return torch.stack(out).reshape(batch, length, channels).transpose(1, 2)


def state_space(
    u: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a state space, step by step, and its last state.

    b and c have the shape (batch, channels, size, length).
    """
    state = u.new_zeros(*u.shape[:2], a.shape[1]).to(a.dtype)
    out = []
    for t in range(u.shape[2]):
        state = (
            torch.exp(dt[:, :, t, None] * a) * state
            + (dt[:, :, t] * u[:, :, t])[..., None] * b[..., t]
        )
        out.append((state * c[..., t]).sum(-1))
    return torch.stack(out, 2), state


def same_with_gradients(
    found: torch.Tensor, expected: torch.Tensor, inputs: tuple[torch.Tensor, ...]
) -> None:
    """Compare two results and the gradients of their inputs."""
    torch.testing.assert_close(found, expected)
    towards = torch.randn_like(expected)
    one = torch.autograd.grad(found, inputs, towards)
    torch.testing.assert_close(
        one, torch.autograd.grad(expected, inputs, towards, True, materialize_grads=True)
    )


def drawn(*shape: int) -> torch.Tensor:
    """Return random numbers in float64 of which gradients are wanted."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)
