"""``xformers.ops`` beside attention: rows chosen from batches, and normalizations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torchdevice.packages.normalization import Way, normalized
from torchdevice.packages.registry import on_simulated_gpu, stands_in


@stands_in("xformers.ops.index_select_cat")
def index_select_cat(
    sources: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return chosen rows of matrices, flat and one after the other.

    Args:
        sources: Matrices (rows, columns), of different sizes.
        indices: The rows of each that are chosen.
    """
    pairs = zip(sources, indices, strict=True)
    return torch.cat([source.index_select(0, index).flatten() for source, index in pairs])


@stands_in("xformers.ops.scaled_index_add")
def scaled_index_add(
    input: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    scaling: torch.Tensor | None = None,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Add ``alpha * scaling * source`` in place to parts of a batch, and return it.

    Args:
        input: (batch, rows, size).
        index: Which of the batch are added to, each once: (count,).
        source: (count, rows, size).
        scaling: (size,).
        alpha: A factor.
    """
    scaled = source if scaling is None else source * scaling
    return input.index_add_(0, index, scaled.to(input.dtype), alpha=alpha)


@stands_in("xformers.ops.rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6) -> torch.Tensor:
    """Return x divided by the root of the mean square of its last dimension, times the weight."""
    _check_gradients(x, weight)
    return normalized(x, weight, None, Way(eps, True))


@stands_in("xformers.ops.rms_norm_add")
def rms_norm_add(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6
) -> torch.Tensor:
    """Add y to x in place, and return the normalization of the sum."""
    _check_gradients(x, y, weight)
    return normalized(x.add_(y), weight, None, Way(eps, True))


def _check_gradients(*given: torch.Tensor | None) -> None:
    """Check on a simulated GPU that the kernel, which has no gradient, needs none.

    Raises:
        ValueError: It needs one.
    """
    wanted = any(each is not None and each.requires_grad for each in given)
    if wanted and torch.is_grad_enabled() and on_simulated_gpu():
        raise ValueError("Gradients not supported.")


@stands_in("xformers.ops.RMSNorm")
class RMSNorm(nn.Module):
    """The root mean square normalization of the last dimension."""

    def __init__(self, dim: int, include_weight: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if include_weight else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_gradients(x, self.weight)
        return normalized(x, self.weight, None, Way(self.eps, True))

    def increment_and_forward_(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add y to x in place, and return the normalization of the sum."""
        _check_gradients(x, y, self.weight)
        return normalized(x.add_(y), self.weight, None, Way(self.eps, True))
