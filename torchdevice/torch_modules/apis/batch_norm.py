"""``SyncBatchNorm``, which torch allows on accelerators that have kernels for it: CUDA and XPU.

The parts of batch normalisation that it calls are here for all other devices, made of operators
that every device has. Arguments and results have the shapes of CUDA's,
aten/src/ATen/native/cuda/Normalization.cu: statistics of C channels, for inputs of shape (N, C,
...). Statistics of float16 and bfloat16 are float32, as on CUDA.

For ``torch/nn/modules/batchnorm.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchdevice.calls.rewriters import rewrites
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context

KERNELS: dict[str, Callable[..., Any]] = {}
"""The parts by the names of their operators."""

_own_device = torch._C.TensorBase.device.__get__


def _kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator's kernel, under its name, for devices that torch has none for."""
    name = kernel.__name__

    @rewrites(
        getattr(torch, name), getattr(torch.ops.aten, name), getattr(torch.ops.aten, name).default
    )
    def run(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By the first argument, the input, which decides the kernel.
        if args and _lacks_kernels(context, args[0]):
            return kernel(*args, **kwargs)
        return func(*args, **kwargs)

    KERNELS[name] = kernel
    return kernel


def _lacks_kernels(context: Context, tensor: Any) -> bool:
    if context.runtime.support.synchronizes_batch_norm or not isinstance(tensor, Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return _own_device(tensor).type == context.device_type


def _accumulated(x: Tensor) -> Tensor:
    # Statistics in half precision would lose the mean of large inputs.
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _across(statistic: Tensor, x: Tensor) -> Tensor:
    """Return the statistic of each channel in a shape that broadcasts with inputs."""
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def _sum(x: Tensor) -> Tensor:
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


@_kernel
def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of each channel."""
    # `correction=0`: batch statistics divide by n.
    variance, mean = torch.var_mean(
        _accumulated(x), [dim for dim in range(x.dim()) if dim != 1], correction=0
    )
    return mean, (variance + eps).rsqrt()


@_kernel
def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """The normalised input."""
    normal = (_accumulated(x) - _across(mean, x)) * _across(invstd, x)
    if weight is not None:
        normal = normal * _across(weight, x)
    if bias is not None:
        normal = normal + _across(bias, x)
    return normal.to(x.dtype)


@_kernel
def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Statistics of all processes from each one's: shapes (processes, C), counts (processes,)."""
    weights = counts.to(means.dtype).view(-1, 1)
    number = weights.sum()
    mean = (means * weights).sum(0) / number
    # The variance of each process, from the inverse deviation, and the distance of its mean from
    # the common one.
    squares = ((invstds**-2 - eps + (means - mean) ** 2) * weights).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
    if running_var is not None:
        # Running variances divide by n - 1, batch variances by n.
        running_var.mul_(1 - momentum).add_(squares / (number - 1), alpha=momentum)
    return mean, (squares / number + eps).rsqrt()


@_kernel
def batch_norm_gather_stats(x: Tensor, means: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """The same, where each process has as many elements of a channel as the last argument says."""
    *same, count = more
    return batch_norm_gather_stats_with_counts(
        x, means, *same, means.new_full((means.shape[0],), float(count))
    )


@_kernel
def batch_norm_backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor | None, ...]:
    """This process's summands for the gradient's sums, and gradients of weight and bias."""
    grad = _accumulated(grad)
    of_grad = _sum(grad)
    of_product = _sum(grad * (_accumulated(x) - _across(mean, x)))
    dtype = weight.dtype if weight is not None else x.dtype
    return (
        of_grad if for_input else None,
        of_product if for_input else None,
        (of_product * invstd).to(dtype) if for_weight else None,
        # A copy, because `of_grad` itself is returned too.
        of_grad.to(dtype).clone() if for_bias else None,
    )


@_kernel
def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    of_grad: Tensor,
    of_product: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of the input, from the sums of all processes."""
    number = count.sum()
    centred = _accumulated(x) - _across(mean, x)
    inner = (
        _accumulated(grad)
        - _across(of_grad / number, x)
        - centred * _across(of_product * invstd**2 / number, x)
    )
    scale = invstd if weight is None else invstd * weight
    return (inner * _across(scale, x)).to(x.dtype)


# ---- what torch refuses --------------------------------------------------------------------------


class _OnAccelerator(Tensor):
    """The input of a ``SyncBatchNorm``, which checks that its input is on an accelerator."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        context = thread_state.state.context
        if context is None:
            return _own_device(self)
        return context.devices.of_program(context.thread.device_index)


@replaces(torch.nn.SyncBatchNorm, "forward", native_to="cuda")
def _forward(context: Context, original: Any, self: Any, input: Tensor) -> Tensor:
    if _lacks_kernels(context, input):
        input = input.as_subclass(_OnAccelerator)
    return original(self, input)


@replaces(DistributedDataParallel, "_passing_sync_batchnorm_handle", native_to="cuda")
def _check_layers(context: Context, original: Any, self: Any, module: torch.nn.Module) -> None:
    """``DistributedDataParallel``, which refuses a module on the CPU that has such a layer."""
    if context.runtime.support.synchronizes_batch_norm:
        original(self, module)
