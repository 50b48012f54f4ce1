"""Adam with 8-bit states, for plans that must fit: the memory of bitsandbytes' AdamW8bit.

A state takes a byte for each element and a float32 for each block of 256. States of tensors with
fewer than 4096 elements stay float32, and so do those of embeddings in transformers' ``Trainer``.
The update works in place. It has no values here, because a plan computes none.

Source: ``bitsandbytes/optim/optimizer.py`` (``Optimizer2State.init_state``), and
``Trainer.create_optimizer``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

BLOCK, LEAST = 256, 4096
"""How many elements have one scale, and from how many elements on states have 8 bits."""


def states_of(parameter: torch.Tensor, *, whole: bool = False) -> dict[str, Any]:
    """Return the states of a parameter; of one that is divided among ranks, those of the part that
    is here.

    Args:
        parameter: The parameter.
        whole: Whether its states stay float32, as those of a small parameter do.
    """
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    found: dict[str, Any] = {"step": torch.tensor(0.0, device="cpu")}
    whole = whole or parameter.numel() < LEAST
    for name in ("state1", "state2"):
        found[name] = torch.empty_like(local, dtype=torch.float32 if whole else torch.uint8)
        if not whole:
            scales = -(-local.numel() // BLOCK)
            found[f"absmax_of_{name}"] = torch.empty(
                scales, dtype=torch.float32, device=local.device
            )
    return found


class _EightBits(torch.optim.Optimizer):
    whole: Collection[torch.Tensor] = ()
    """The parameters whose states stay float32, in a collection that compares by identity."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the states of the parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None and not self.state[each]:
                    self.state[each] = states_of(each, whole=each in self.whole)
        return loss


class EightBitAdamW(_EightBits, torch.optim.AdamW):
    """Replaces ``torch.optim.AdamW``."""


class EightBitAdam(_EightBits, torch.optim.Adam):
    """Replaces ``torch.optim.Adam``."""


_OF: Mapping[type[torch.optim.Optimizer], type[_EightBits]] = {
    torch.optim.Adam: EightBitAdam,
    torch.optim.AdamW: EightBitAdamW,
}


def shrink(optimizer: torch.optim.Optimizer, whole: Collection[torch.Tensor]) -> bool:
    """Give an optimizer that torch has just made states of 8 bits. Return whether it can have them.

    A class of the program's own keeps its step, and with it its states.

    Args:
        optimizer: The optimizer, without states.
        whole: See ``_EightBits.whole``.
    """
    small = _OF.get(type(optimizer))
    if small is None:
        return False
    optimizer.__class__ = small
    optimizer.whole = whole  # type: ignore[attr-defined]
    optimizer._patch_step_function()  # type: ignore[attr-defined] # as torch does for each class
    return True
