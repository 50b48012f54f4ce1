"""Runs an operator on the CPU: the reference with which a result of the target is compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchdevice.foundation.interrupt_safe_exit import block
from torchdevice.foundation.stand_ins import tensors
from torchdevice.foundation.torch_internals import ExcludeDispatchKeyGuard
from torchdevice.verify.inputs import WIDE, Copies, Inputs

_below_autograd = torch._C._AutoDispatchBelowAutograd
_without_dispatch_modes = torch._C._DisableTorchDispatch

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

MOVES = 3
"""How often the inputs are moved by a rounding to find how far results may be off."""


@block
def unseen() -> Iterator[None]:
    """Let torch's operators be called that no mode, no autograd and no autocast of the program sees."""
    with torch._C.DisableTorchFunction(), _without_dispatch_modes(), _below_autograd(), torch.no_grad():
        with ExcludeDispatchKeyGuard(_AUTOCAST):
            yield


def run(op: Any, copies: Copies) -> Any:
    """Return what an operator gives on the CPU."""
    return op._op(*copies.args, **copies.kwargs)


def moved(op: Any, inputs: Inputs, place: Any) -> tuple[list[Any], Any] | None:
    """Return a result in float64 for inputs that were moved by up to one rounding each, and for the inputs themselves.

    Args:
        op: The operator.
        inputs: What it was given.
        place: Returns the result that is compared, of a call's results and copies.

    Returns:
        None where the CPU has no kernel for float64.
    """
    # The relative size of a rounding in the least precise dtype among the inputs.
    dtypes = [each.dtype for each in tensors((inputs.args, inputs.kwargs)) if each.dtype in WIDE]
    precision = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    generator = torch.Generator().manual_seed(0)

    def move(values: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(values.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return values * (1 + precision * noise)

    try:
        found = []
        for change in (lambda values: values, *[move] * MOVES):
            copies = inputs.wide(change)
            found.append(place(run(op, copies), copies))
    except Exception:
        return None
    return found[1:], found[0]
