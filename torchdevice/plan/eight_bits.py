"""Adam with states of 8 bits, for plans of what would make a program fit: the memory of
bitsandbytes' AdamW8bit.

A state takes a byte for each element and a float32 for each block of 256. States of tensors with
fewer than 4096 elements stay float32, and so do those of embeddings in transformers' ``Trainer``.
The update works in place. It has no values here, because a plan computes none.

Source: ``bitsandbytes/optim/optimizer.py`` (``Optimizer2State.init_state``), and
``Trainer.create_optimizer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

BLOCK, LEAST = 256, 4096
"""How many elements have one scale, and from how many elements on states have 8 bits."""

_whole: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The parameters whose states stay float32. It holds none of them, so the number of one that is
freed means nothing.
"""


def keep_whole(parameters: Iterable[torch.Tensor]) -> None:
    """Keep the states of some parameters in float32."""
    for each in parameters:
        _whole[each] = True


def states_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the states of a parameter; of one that is divided among ranks, those of the part that
    is here.
    """
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    found: dict[str, Any] = {"step": torch.tensor(0.0, device="cpu")}
    small = parameter.numel() < LEAST or parameter in _whole
    for name in ("state1", "state2"):
        found[name] = torch.empty_like(local, dtype=torch.float32 if small else torch.uint8)
        if not small:
            scales = -(-local.numel() // BLOCK)
            found[f"absmax_of_{name}"] = torch.empty(
                scales, dtype=torch.float32, device=local.device
            )
    return found


class _EightBits(torch.optim.Optimizer):
    used: ClassVar[list[type]] = []
    """The classes of which the program has made optimizers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used.append(type(self))

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
                    self.state[each] = states_of(each)
        return loss


class EightBitAdamW(_EightBits, torch.optim.AdamW):
    """In the place of ``torch.optim.AdamW``."""


class EightBitAdam(_EightBits, torch.optim.Adam):
    """In the place of ``torch.optim.Adam``."""
