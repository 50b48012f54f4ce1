"""``apex.optimizers``, by papers and apex's documentation, in float32 or wider."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from torchdevice.packages.extension_refusals import check_master_weights, check_optimized
from torchdevice.packages.registry import on_simulated_gpu, refuses, stands_in, widened

_WITH_KERNELS = (torch.float16, torch.float32)


class _Fused(Optimizer):
    """An optimizer that updates one parameter after the other.

    Attributes:
        taken: The dtypes that it takes on a GPU.
    """

    taken: tuple[torch.dtype, ...] = _WITH_KERNELS

    def __init__(self, params: Any, defaults: dict[str, Any], set_grad_none: bool) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or set them to 0 if ``set_grad_none=False`` was given."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have gradients. Return what the closure returns."""
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None, factor: torch.Tensor | None = None) -> Any:
        """Update the parameters by their gradients, times a factor if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        for group in self.param_groups:
            self._count(group)
            self._update_group(group, self._gradients(group, factor))
        return loss

    def _count(self, group: Any) -> None:
        """Count a step of a group."""
        group["step"] = group.get("step", 0) + 1

    def _gradients(
        self, group: Any, factor: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parameters that have gradients, and these in float32 or wider."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise RuntimeError(
                    f"{type(self).__name__} takes no sparse gradients. Use torch.optim.SparseAdam."
                )
            check_optimized(type(self).__name__, parameter, parameter.grad, self.taken)
            gradient = _wide(parameter.grad)
            if factor is not None:
                gradient = gradient * factor.to(gradient.device)
                parameter.grad.copy_(gradient)  # the program sees it without the scale
            yield parameter, gradient

    def _begin(self) -> None:
        """Compute a step's values from all gradients together."""

    def _update_group(self, group: Any, given: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for parameter, gradient in given:
            self._update(parameter, gradient, gradient.dtype, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, wide: torch.dtype, group: Any
    ) -> None:
        raise NotImplementedError


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = widened(tensor)[0]
    return found


def _refuse_amsgrad(optimizer: str, amsgrad: bool) -> None:
    if amsgrad:
        raise RuntimeError(f"{optimizer} has no AMSGrad. Use torch.optim.AdamW(amsgrad=True).")


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
        capturable: Whether a CUDA graph may record steps: learning rate and steps are then tensors
            on the device, and a gradient scaler leaves unscaling, and steps that overflow, to the
            optimizer. The optimizer then takes gradients in float16.
        master_weights: Whether float32 copies of parameters in half precision are kept and updated.
    """

    taken = (*_WITH_KERNELS, torch.bfloat16)

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
        _refuse_amsgrad("FusedAdam", amsgrad)
        check_master_weights(master_weights, capturable)
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
        self._overflows: torch.Tensor | None = None
        if capturable:
            self._step_supports_amp_scaling = True  # which torch's gradient scaler asks for
            for group in self.param_groups:
                if group["params"]:
                    group["lr"] = _number(group["lr"], torch.float32, group["params"][0])

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
        scale = None if grad_scaler is None else grad_scaler._get_scale_async()
        if grad_scaler is None or scale is None:
            return self._step(closure)
        found = list(grad_scaler._check_inf_per_device(self).values())
        if found:
            self._overflows = torch.stack([each.to(scale).sum() for each in found]).sum() > 0
        try:
            return self._step(closure, scale.reciprocal())
        finally:
            self._overflows = None

    def _count(self, group: Any) -> None:
        if not self.capturable or not group["params"]:
            super()._count(group)
            return
        group["step"] = _number(group.get("step", 0), torch.int32, group["params"][0])
        # In place, as a graph repeats it.
        group["step"] += 1 if self._overflows is None else ~self._overflows

    def _write(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Write a value, unless gradients overflowed. Only the device knows whether they did."""
        if self._overflows is not None:
            value = torch.where(self._overflows.to(target.device), target, value)
        if value is not target:
            target.copy_(value)

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
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        if self._overflows is not None:
            mean, square = mean.clone(), square.clone()
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        self._write(state["exp_avg"], mean)
        self._write(state["exp_avg_sq"], square)
        if group["bias_correction"]:
            mean = mean / _weight_so_far(first, group["step"])
            square = square / _weight_so_far(second, group["step"])
        change = mean / (square.sqrt() + group["eps"])
        if group["weight_decay"] and self.adam_w_mode:
            change = change + group["weight_decay"] * weights
        updated = weights - group["lr"] * change
        if "master" in state:
            self._write(state["master"], updated)
        self._write(parameter, updated)


def _number(given: Any, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return a number as a tensor on the device of another; one that is there, as it is."""
    if isinstance(given, torch.Tensor) and given.device == like.device:
        return given
    return torch.as_tensor(given, dtype=dtype, device=like.device)


def _weight_so_far(beta: float, step: Any) -> Any:
    """Return the sum of a running average's weights so far: ``1 - beta**step``."""
    if isinstance(step, torch.Tensor) and beta > 0:
        return -torch.expm1(step * math.log(beta))
    return 1 - beta**step


@stands_in("apex.optimizers.FusedSGD apex.optimizers.fused_sgd.FusedSGD")
class FusedSGD(_Fused):
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        momentum: The factor of the momentum.
        dampening: The dampening of the gradient's part of the momentum.
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

    def _gradients(
        self, group: Any, factor: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if on_simulated_gpu():
            # A GPU leaves parameters of other dtypes as they are, without an error.
            updated = [each for each in group["params"] if each.dtype in self.taken]
            group = {**group, "params": updated}
        return super()._gradients(group, factor)

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


class _OfLayers(_Fused):
    """An optimizer that scales the step of each parameter by norms of whole tensors."""

    def _bias_corrections(self, group: Any) -> tuple[float, float]:
        """Return the weights of the two moments so far."""
        if not group["bias_correction"]:
            return 1.0, 1.0
        first, second = group["betas"]
        return 1 - first ** group["step"], 1 - second ** group["step"]

    def _averaged(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Any
    ) -> torch.Tensor:
        """Return the running average of gradients, of which the state keeps a rounded copy."""
        state, first = self.state[parameter], group["betas"][0]
        share = 1 - first if group["grad_averaging"] else 1.0
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean = _wide(state["exp_avg"]) * first + share * gradient
        state["exp_avg"].copy_(mean)
        return mean


@stands_in("apex.optimizers.FusedLAMB apex.optimizers.fused_lamb.FusedLAMB")
class FusedLAMB(_OfLayers):
    """LAMB (arXiv 1904.00962): Adam's step, scaled by the norm of each parameter.

    Moments have the dtype of the parameter.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        bias_correction: Whether the moments are divided by their weights so far.
        betas: The decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: The factor of weight decay.
        amsgrad: Must be False, as in apex.
        adam_w_mode: Whether weight decay is apart from the gradient.
        grad_averaging: Whether the first moment takes ``1 - betas[0]`` of the gradient.
        set_grad_none: Whether ``zero_grad`` drops the gradients.
        max_grad_norm: The norm of all gradients together to which larger ones are scaled.
        use_nvlamb: Whether parameters without weight decay are scaled too.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _refuse_amsgrad("FusedLAMB", amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults, set_grad_none)
        self.adam_w_mode = int(adam_w_mode)
        self.use_nvlamb = use_nvlamb
        self._excess: Any = 1.0

    def _begin(self) -> None:
        """Compute by how much the norm of all gradients exceeds the largest one."""
        norms = [
            torch.linalg.vector_norm(gradient)
            for group in self.param_groups
            for _, gradient in self._gradients(group)
        ]
        if norms:
            device, dtype = norms[0].device, max((each.dtype for each in norms), key=_bytes)
            whole = torch.stack([each.to(device, dtype) for each in norms])
            excess = torch.linalg.vector_norm(whole) / self.defaults["max_grad_norm"]
            self._excess = excess.clamp(min=1.0)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, wide: torch.dtype, group: Any
    ) -> None:
        state = self.state[parameter]
        weights = parameter.to(wide)
        decay = group["weight_decay"]
        gradient = gradient / self._excess
        if decay and not self.adam_w_mode:
            gradient = gradient + decay * weights
        mean = self._averaged(parameter, gradient, group)
        second = group["betas"][1]
        square = (1 - second) * gradient * gradient
        if "exp_avg_sq" in state:
            square = square + second * _wide(state["exp_avg_sq"])
        state["exp_avg_sq"] = square.to(parameter.dtype)
        of_mean, of_square = self._bias_corrections(group)
        change = (mean / of_mean) / ((square / of_square).sqrt() + group["eps"])
        if decay and self.adam_w_mode:
            change = change + decay * weights
        change = change.to(parameter.dtype).to(wide)  # as the kernel keeps it between two launches
        if decay or self.use_nvlamb:
            change = change * _trust(weights, change)
        parameter.copy_(weights - group["lr"] * change)


def _bytes(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _trust(weights: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """Return the norm of the weights by that of their change; 1 where one of them is 0."""
    of_weights, of_change = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(change)
    has_both = (of_weights != 0) & (of_change != 0)
    return torch.where(has_both, of_weights / of_change, torch.ones_like(of_change))


@stands_in("apex.optimizers.FusedNovoGrad apex.optimizers.fused_novograd.FusedNovoGrad")
class FusedNovoGrad(_OfLayers):
    """NovoGrad (arXiv 1905.11286): Adam with one second moment for each parameter, of its norm.

    A group keeps the norms in ``exp_avg_sq``: those of parameters in half precision, and the
    others.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        bias_correction: Whether the moments are divided by their weights so far.
        betas: The decay of the two moments.
        eps: Added to the norm.
        weight_decay: The factor of weight decay.
        amsgrad: Must be False, as in apex.
        reg_inside_moment: Whether the first moment is of normalized and decayed gradients.
        grad_averaging: Whether the first moment takes ``1 - betas[0]`` of the gradient.
        norm_type: 2, or 0 for the largest element.
        init_zero: Whether the norms begin with 0, and not with those of the first step.
        set_grad_none: Whether ``zero_grad`` drops the gradients.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad("FusedNovoGrad", amsgrad)
        if norm_type not in (0, 2):
            raise RuntimeError("FusedNovoGrad only support l2/inf norm now.")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)
        self.moment_mode = 0 if reg_inside_moment else 1

    def _update_group(self, group: Any, given: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        pairs = list(given)
        halves = [pair for pair in pairs if pair[0].dtype.itemsize == 2]
        others = [pair for pair in pairs if pair[0].dtype.itemsize != 2]
        kept = group.setdefault("exp_avg_sq", [None, None])
        for place, part in enumerate((halves, others)):
            if not part:
                continue
            kept[place] = self._norms([gradient for _, gradient in part], kept[place], group)
            for (parameter, gradient), norm in zip(part, kept[place], strict=True):
                self._update_by(parameter, gradient, norm.to(gradient), group)

    def _norms(
        self, gradients: list[torch.Tensor], before: torch.Tensor | None, group: Any
    ) -> torch.Tensor:
        """Return the running norms, one for each gradient."""
        power = group["norm_type"] or float("inf")
        norms = torch.stack(
            [torch.linalg.vector_norm(each, power).to(gradients[0]) for each in gradients]
        )
        if before is None and not group["init_zero"]:
            return norms
        before = torch.zeros_like(norms) if before is None else before.to(norms)
        second = group["betas"][1]
        if group["norm_type"] == 0:
            return second * before + (1 - second) * norms
        return (second * before.square() + (1 - second) * norms.square()).sqrt()

    def _update_by(
        self, parameter: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor, group: Any
    ) -> None:
        weights, decay = parameter.to(gradient.dtype), group["weight_decay"]
        of_mean, of_square = self._bias_corrections(group)
        divisor = norm / of_square**0.5 + group["eps"]
        if self.moment_mode == 0:
            gradient = gradient / divisor + decay * weights
            change = self._averaged(parameter, gradient, group) / of_mean
        else:
            mean = self._averaged(parameter, gradient, group) / of_mean
            change = mean / divisor + decay * weights
        parameter.copy_(weights - group["lr"] * change)


refuses(
    "apex.optimizers.FusedMixedPrecisionLamb",
    "Use apex.optimizers.FusedLAMB with torch.autocast('cuda').",
)
