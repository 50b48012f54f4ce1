"""``apex.optimizers``: Adam and SGD by papers and apex's documentation, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from torchdevice.packages.registry import refuses, stands_in


class _Fused(Optimizer):
    """An optimizer that updates one parameter after the other."""

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or set them to 0 if ``set_grad_none=False`` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have gradients. Return what the closure returns."""
        return self._step(closure, 1.0)

    def _step(self, closure: Callable[[], Any] | None, factor: float) -> Any:
        """Update the parameters by their gradients times a factor."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(
                        f"{type(self).__name__} takes no sparse gradients. Use "
                        "torch.optim.SparseAdam."
                    )
                wide = torch.promote_types(parameter.dtype, torch.float32)
                gradient = parameter.grad.to(wide)
                if factor != 1:
                    gradient = gradient * factor
                    parameter.grad.copy_(gradient)  # the program sees it without the scale
                self._update(parameter, gradient, wide, group)
        return loss

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, wide: torch.dtype, group: Any
    ) -> None:
        raise NotImplementedError


@stands_in("apex.optimizers.FusedAdam apex.optimizers.fused_adam.FusedAdam")
class FusedAdam(_Fused):
    """Adam (arXiv 1412.6980), or ``adam_w_mode``'s AdamW (arXiv 1711.05101), with float32 moments.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        bias_correction: Whether the moments are divided by their weights so far.
        betas: The decay of the two moments.
        eps: Added to the root of the second moment.
        adam_w_mode: Whether weight decay is apart from the gradient.
        weight_decay: The factor of weight decay.
        amsgrad: Must be False, as in apex.
        set_grad_none: Whether ``zero_grad`` drops the gradients.
        capturable: Whether a gradient scaler leaves unscaling, and steps that overflow, to the
            optimizer. The optimizer then takes gradients in float16.
        master_weights: Whether float32 copies of parameters in half precision are kept and updated.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam has no AMSGrad. Use torch.optim.AdamW(amsgrad=True).")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, set_grad_none)
        self.adam_w_mode, self.master_weights = int(adam_w_mode), master_weights
        self.capturable = capturable
        if capturable:
            self._step_supports_amp_scaling = True  # which torch's gradient scaler asks for

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Update the parameters that have gradients. Return what the closure returns.

        Args:
            closure: Computes the loss again.
            grads: Must be None, as the three that follow.
            output_params: See ``grads``.
            scale: See ``grads``.
            grad_norms: See ``grads``.
            grad_scaler: The scaler whose ``step`` calls. Nothing is updated after an overflow.

        Raises:
            RuntimeError: An argument of apex's older optimizer is given.
        """
        if any(each is not None for each in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam has been updated. Simply initialize it identically to torch.optim.Adam, "
                "and call step() with no arguments."
            )
        if grad_scaler is None:
            return self._step(closure, 1.0)
        overflows = grad_scaler._check_inf_per_device(self).values()
        if sum(each.item() for each in overflows):
            return None
        return self._step(closure, 1 / grad_scaler.get_scale())

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, wide: torch.dtype, group: Any
    ) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
            if self.master_weights and parameter.dtype != wide:
                state["master"] = parameter.to(wide)
        weights = state.get("master", parameter.to(wide))
        if group["weight_decay"] and not self.adam_w_mode:
            gradient = gradient + group["weight_decay"] * weights
        mean = state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        if group["bias_correction"]:
            mean = mean / (1 - first ** group["step"])
            square = square / (1 - second ** group["step"])
        change = mean / (square.sqrt() + group["eps"])
        if group["weight_decay"] and self.adam_w_mode:
            change = change + group["weight_decay"] * weights
        updated = weights - group["lr"] * change
        if "master" in state:
            state["master"].copy_(updated)
        parameter.copy_(updated)


@stands_in("apex.optimizers.FusedSGD apex.optimizers.fused_sgd.FusedSGD")
class FusedSGD(_Fused):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        momentum: The factor of the momentum.
        dampening: What the gradient's part of the momentum is reduced by.
        weight_decay: The factor of weight decay.
        nesterov: Whether momentum is Nesterov's.
        wd_after_momentum: Whether weight decay is added after the momentum.
        materialize_master_grads: Means nothing here.
        set_grad_none: Whether ``zero_grad`` drops the gradients.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening):
            raise ValueError(
                f"nesterov needs a momentum and no dampening, not {momentum!r} and {dampening!r}."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
        }
        super().__init__(params, {**defaults, "nesterov": nesterov}, set_grad_none)
        self.wd_after_momentum = wd_after_momentum

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, wide: torch.dtype, group: Any
    ) -> None:
        weights, decay = parameter.to(wide), group["weight_decay"]
        if decay and not self.wd_after_momentum:
            gradient = gradient + decay * weights
        if group["momentum"]:
            state = self.state[parameter]
            kept = gradient
            if "momentum_buffer" in state:
                kept = state["momentum_buffer"].to(wide) * group["momentum"]
                kept = kept.add(gradient, alpha=1 - group["dampening"])
            # The buffer has the dtype of the parameter. The step uses what it is rounded from.
            state["momentum_buffer"] = kept.to(parameter.dtype, copy=True)
            gradient = gradient + group["momentum"] * kept if group["nesterov"] else kept
        if decay and self.wd_after_momentum:
            gradient = gradient + decay * weights
        # The step is rounded before it is added, and so is the sum.
        parameter.add_((-group["lr"] * gradient).to(parameter.dtype))


@stands_in("apex.optimizers.FusedAdagrad apex.optimizers.fused_adagrad.FusedAdagrad")
class FusedAdagrad(_Fused):
    """Adagrad (Duchi, Hazan and Singer, 2011), as ``torch.optim.Adagrad``.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        eps: Added to the root of the sum of squares.
        weight_decay: The factor of weight decay.
        set_grad_none: Whether ``zero_grad`` drops the gradients.
        adagrad_w_mode: Whether weight decay is apart from the gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, set_grad_none)
        self.adagrad_w_mode = int(adagrad_w_mode)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, wide: torch.dtype, group: Any
    ) -> None:
        state = self.state[parameter]
        weights = parameter.to(wide)
        decay = group["weight_decay"]
        if not state:
            state["sum"] = torch.zeros_like(parameter, dtype=wide)
        if decay and not self.adagrad_w_mode:
            gradient = gradient + decay * weights
        total = state["sum"].addcmul_(gradient, gradient)
        change = gradient / (total.sqrt() + group["eps"])
        if decay and self.adagrad_w_mode:
            change = change + decay * weights
        parameter.copy_(weights - group["lr"] * change)


refuses(
    "apex.optimizers.FusedLAMB apex.optimizers.FusedNovoGrad",
    "Use FusedAdam, or an optimizer of torch.optim.",
)
