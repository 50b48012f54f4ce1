"""``xformers.ops.SwiGLU``: ``w3(silu(w1 x) * w2 x)`` (arXiv 2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchdevice.packages.registry import stands_in


@stands_in("xformers.ops.swiglu")
def swiglu(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    w3: torch.Tensor,
    b3: torch.Tensor | None,
    *,
    op: Any = None,
) -> torch.Tensor:
    """Return ``w3(silu(w1 x) * w2 x)`` of the last dimension of x, each with its bias."""
    gate = functional.silu(functional.linear(x, w1, b1))
    return functional.linear(gate * functional.linear(x, w2, b2), w3, b3)


@stands_in("xformers.ops.SwiGLU")
class SwiGLU(nn.Module):
    """The module of :func:`swiglu`.

    Args:
        in_features: The size of the input.
        hidden_features: The size between the two steps.
        out_features: The size of the result. Default: that of the input.
        bias: Whether there are biases.
        _pack_weights: Whether w1 and w2 are one parameter, ``w12``, which the names in a checkpoint
            depend on.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        self.in_features, self.hidden_features = in_features, hidden_features
        self.out_features = out_features or in_features
        self.w12: nn.Linear | None = None
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        else:
            self.w1 = nn.Linear(in_features, hidden_features, bias=bias)
            self.w2 = nn.Linear(in_features, hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, self.out_features, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.w12(x).chunk(2, -1) if self.w12 is not None else (self.w1(x), self.w2(x))
        return self.w3(functional.silu(a) * b)
