"""The parts of batch normalisation that ``SyncBatchNorm`` calls, which CUDA has and a CPU has not.

Arguments and results have the shapes of CUDA's, aten/src/ATen/native/cuda/Normalization.cu: statistics of C channels,
for inputs of shape (N, C, ...). Statistics of float16 and bfloat16 are float32, as on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation.allocator import fresh
from torchdevice.simulation.kernels import aliased, index_of, without_mode

KERNELS: dict[str, Callable[..., Any]] = {}
"""Kernels by the names of their operators."""


def _on_cpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Register a kernel that is written for CPU tensors, under the name of its operator."""

    def run(*args: Any) -> Any:
        index = index_of(args[0])
        taken = [aliased(each) if isinstance(each, torch.Tensor) else each for each in args]
        result = kernel(*taken)
        if isinstance(result, torch.Tensor):
            return fresh(result, index)
        return tuple(each if each is None else fresh(each, index) for each in result)

    KERNELS[kernel.__name__] = without_mode(run)
    return kernel


def _accumulated(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _across(statistic: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the statistic of each channel in a shape that broadcasts with inputs."""
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


@_on_cpu
def batch_norm_stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse standard deviation of each channel."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(_accumulated(x), dims, correction=0)
    return mean, (variance + eps).rsqrt()


@_on_cpu
def batch_norm_elemt(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The normalised input."""
    normal = (_accumulated(x) - _across(mean, x)) * _across(invstd, x)
    if weight is not None:
        normal = normal * _across(weight, x)
    return (normal if bias is None else normal + _across(bias, x)).to(x.dtype)


@_on_cpu
def batch_norm_gather_stats_with_counts(
    x: torch.Tensor,
    means: torch.Tensor,
    invstds: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics of all processes together, from those of each: shapes (processes, C), and (processes,) for counts."""
    weights = counts.to(means.dtype).view(-1, 1)
    number = weights.sum()
    mean = (means * weights).sum(0) / number
    squares = ((invstds**-2 - eps + (means - mean) ** 2) * weights).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(squares / (number - 1), alpha=momentum)
    return mean, (squares / number + eps).rsqrt()


@_on_cpu
def batch_norm_gather_stats(
    x: torch.Tensor,
    means: torch.Tensor,
    invstds: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics of all processes together, where each process has ``count`` elements of a channel."""
    counts = torch.full((means.shape[0],), float(count))
    return batch_norm_gather_stats_with_counts(x, means, invstds, running_mean, running_var, momentum, eps, counts)


@_on_cpu
def batch_norm_backward_reduce(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    """What this process adds to the sums of the gradient, and gradients of weight and bias."""
    grad = _accumulated(grad)
    of_grad = _sum(grad)
    of_product = _sum(grad * (_accumulated(x) - _across(mean, x)))
    return (
        of_grad if for_input else None,
        of_product if for_input else None,
        (of_product * invstd).to(weight.dtype if weight is not None else x.dtype) if for_weight else None,
        of_grad.to(weight.dtype if weight is not None else x.dtype).clone() if for_bias else None,
    )


@_on_cpu
def batch_norm_backward_elemt(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    of_grad: torch.Tensor,
    of_product: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """The gradient of the input, from the sums of all processes."""
    number = count.sum()
    centred = _accumulated(x) - _across(mean, x)
    inner = _accumulated(grad) - _across(of_grad / number, x) - centred * _across(of_product * invstd**2 / number, x)
    scale = invstd if weight is None else invstd * weight
    return (inner * _across(scale, x)).to(x.dtype)
