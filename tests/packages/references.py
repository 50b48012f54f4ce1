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
    """Return the attention (batch, rows, heads, size) and the logarithms of sums (batch, heads, rows), row by row."""
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
                        score = score - slopes.reshape(-1, heads)[b if slopes.dim() == 2 else 0, h] * abs(distance)
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
