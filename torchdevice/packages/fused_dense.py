"""``flash_attn.ops.fused_dense`` and ``flash_attn.ops.activations``: layers of torch.nn."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchdevice.kernel.thread_state import refuse
from torchdevice.packages.registry import in_autocast_dtype, stands_in, widened, without_autocast

_MODULE = "flash_attn.ops.fused_dense"

_ONE_PROCESS = "Use torch.distributed.tensor.parallel.ColwiseParallel."


@stands_in(f"{_MODULE}.fused_dense_func")
def fused_dense_func(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    return_residual: bool = False,
    process_group: Any = None,
    sequence_parallel: bool = True,
) -> Any:
    """Return the linear map of the last dimension; with ``return_residual`` x too."""
    if process_group is not None:
        refuse(f"{_MODULE}.fused_dense_func(process_group=...)", _ONE_PROCESS)
    x = in_autocast_dtype(x)
    out = functional.linear(x, weight, bias)
    return (out, x) if return_residual else out


@stands_in(f"{_MODULE}.FusedDense")
class FusedDense(nn.Linear):
    """``torch.nn.Linear``, which returns its input too by choice."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x: torch.Tensor, process_group: Any = None) -> Any:
        if process_group is not None:
            refuse(f"{_MODULE}.FusedDense(process_group=...)", _ONE_PROCESS)
        x = in_autocast_dtype(x)
        out = functional.linear(x, self.weight, self.bias)
        return (out, x) if self.return_residual else out


_ACTIVATIONS: dict[str, Any] = {
    "gelu_approx": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "sqrelu": lambda x: functional.relu(x).square(),
}


@stands_in(f"{_MODULE}.FusedMLP")
class FusedMLP(nn.Module):
    """Two linear maps with an activation between them.

    Args:
        in_features: The size of the input.
        hidden_features: The size between the maps. Default: four times that of the input.
        out_features: The size of the result. Default: that of the input.
        bias1: Whether the first map has a bias.
        bias2: Whether the second map has one.
        activation: "gelu_approx", "relu" or "sqrelu".
        return_residual: Whether the input is returned too.
        checkpoint_lvl: What is recomputed for gradients, which means nothing here.
        heuristic: Means nothing here.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias1: bool = True,
        bias2: bool = True,
        activation: str = "gelu_approx",
        return_residual: bool = False,
        checkpoint_lvl: int = 0,
        heuristic: Any = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if activation not in _ACTIVATIONS:
            raise AssertionError(
                f"activation={activation!r} is not one of {', '.join(_ACTIVATIONS)}."
            )
        super().__init__()
        hidden = hidden_features or in_features * 4
        size = out_features or in_features
        self.activation = activation
        self.return_residual = return_residual
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, size, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, process_group: Any = None) -> Any:
        if process_group is not None:
            refuse(f"{_MODULE}.FusedMLP(process_group=...)", _ONE_PROCESS)
        x = in_autocast_dtype(x)
        out = self.fc2(_ACTIVATIONS[self.activation](self.fc1(x)))
        return (out, x) if self.return_residual else out


@stands_in("flash_attn.ops.activations.swiglu")
def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x) * y``, rounded once."""
    wide_x, wide_y = widened(x, y)
    with without_autocast(x):
        return (functional.silu(wide_x) * wide_y).to(x.dtype)
