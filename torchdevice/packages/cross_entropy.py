"""``flash_attn.losses.cross_entropy`` and the function behind it, in float32 or wider."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchdevice.kernel.thread_state import refuse
from torchdevice.packages.registry import on_simulated_gpu, stands_in, wide_dtype, without_autocast

_ONE_PROCESS = "Use torch.distributed.tensor.parallel.loss_parallel, or gather the logits first."


@stands_in("flash_attn.ops.triton.cross_entropy.cross_entropy_loss")
def cross_entropy_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    precomputed_lse: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's loss, and the part added by ``lse_square_scale``, without a gradient.

    Args:
        logits: (rows, classes).
        labels: (rows,).
        precomputed_lse: The logarithms of sums of exponentials (rows,), taken where logits are
            neither scaled nor smoothed. Gradients are as without it.
        label_smoothing: The share of the labels that all classes have together.
        logit_scale: The factor of the logits.
        lse_square_scale: The factor of the squared logarithms of sums that are added (the
            "z-loss").
        ignore_index: The label of rows whose loss is 0.
        inplace_backward: Whether gradients may take the memory of the logits, which they do not
            here.
        process_group: Not stood in for: the classes of all processes.
    """
    if process_group is not None:
        refuse(
            "flash_attn.ops.triton.cross_entropy.cross_entropy_loss(process_group=...)",
            _ONE_PROCESS,
        )
    if logit_scale <= 0.0:
        raise AssertionError(f"logit_scale={logit_scale!r} is not positive.")
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        shapes = tuple(logits.shape), tuple(labels.shape)
        raise AssertionError(
            "logits and labels have the shapes {} and {}. Use (rows, classes) and (rows,).".format(
                *shapes
            )
        )
    wide = wide_dtype(logits.dtype)
    with without_autocast(logits):
        scores = logits.to(wide) * logit_scale
        sums = torch.logsumexp(scores, 1)
        if precomputed_lse is not None and logit_scale == 1.0 and label_smoothing == 0.0:
            sums = sums + (precomputed_lse.to(wide) - sums).detach()
        ignored = labels == ignore_index
        chosen = scores.gather(1, labels.long().masked_fill(ignored, 0)[:, None])[:, 0]
        aimed = (1 - label_smoothing) * chosen
        if label_smoothing:
            aimed = aimed + label_smoothing * scores.mean(1)
        added = (lse_square_scale * sums.square()).masked_fill(ignored, 0.0)
        losses = (sums - aimed).masked_fill(ignored, 0.0) + added
    return losses, added.detach()


@stands_in("flash_attn.losses.cross_entropy.CrossEntropyLoss")
class CrossEntropyLoss(nn.Module):
    """Cross entropy of logits (rows, classes) and labels (rows,), with smoothing and "z-loss"."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError("Only support reduction = 'mean' or 'none' or 'sum'")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale, self.lse_square_scale = logit_scale, lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, precomputed_lse: torch.Tensor | None = None
    ) -> Any:
        """Return the loss; with ``return_z_loss`` also the part that ``lse_square_scale`` adds."""
        if on_simulated_gpu() and not (input.is_cuda and target.is_cuda):
            raise AssertionError("Only support CUDA tensors")
        function: Any = cross_entropy_loss
        losses, added = function.__wrapped__(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        loss, z_loss = self._reduced(losses, target), self._reduced(added, target)
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduced(self, losses: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return losses
        total = losses.sum()
        return total / (target != self.ignore_index).sum() if self.reduction == "mean" else total
