"""``apex.parallel``: LARC and batch normalizations; torch has the other functions now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchdevice.packages.registry import refuses, stands_in

refuses("apex.parallel.DistributedDataParallel", "Use torch.nn.parallel.DistributedDataParallel.")
refuses("apex.parallel.create_syncbn_process_group", "Use torch.distributed.new_group.")


@stands_in("apex.parallel.convert_syncbn_model")
def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Return a model whose batch normalizations have the statistics of all ranks."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)


@stands_in("apex.parallel.SyncBatchNorm")
class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm``, with channels last and a ReLU by choice.

    Args:
        channel_last: Whether the channels are the last dimension.
        fuse_relu: Whether negative results become 0.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group)
        self.channel_last, self.fuse_relu = channel_last, fuse_relu

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalization of the input, to which z is added before a ReLU."""
        x = input.movedim(-1, 1) if self.channel_last else input
        out = super().forward(x)
        out = out.movedim(1, -1) if self.channel_last else out
        out = out if z is None else out + z
        return functional.relu(out) if self.fuse_relu else out


@stands_in("apex.parallel.LARC.LARC apex.parallel.LARC")
class LARC:
    """An optimizer around another one, with a learning rate for each parameter (arXiv 1708.03888).

    Args:
        optimizer: The optimizer that takes the steps.
        trust_coefficient: The largest change of a parameter in a step, as a part of its norm.
        clip: Whether the optimizer's own learning rate is the largest.
        eps: Added to the norms in divisors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    @property
    def state(self) -> Any:
        """The state of the optimizer inside."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer inside."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop the gradients, or set them to 0."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer inside."""
        self.optim.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, which take the weight decay too, and take a step."""
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._scale(parameter, decay, group["lr"])
            if "weight_decay" in group:
                group["weight_decay"] = 0
        try:
            return self.optim.step(closure)
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    def _scale(self, parameter: torch.Tensor, decay: float, rate: float) -> None:
        """Scale the gradient of a parameter; not where it or the parameter is 0."""
        gradient: Any = parameter.grad
        size, slope = float(torch.norm(parameter)), float(torch.norm(gradient))
        if size == 0 or slope == 0:
            return
        own = self.trust_coefficient * size / (slope + size * decay + self.eps)
        factor = own
        if self.clip:
            # A warm-up may begin with a rate of 0. Apex divides tensors, and takes min(inf, 1).
            factor = 1.0 if rate == 0 else min(own / rate, 1.0)
        gradient.add_(parameter, alpha=decay).mul_(factor)
