"""Runs an operator on the CPU: the reference with which a result of the target is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torchdevice.kernel.stand_ins import tensors
from torchdevice.kernel.torch_internals import ExcludeDispatchKeyGuard
from torchdevice.verify.inputs import WIDE, Copies, Inputs

T = TypeVar("T")

with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
    # One guard for all of them: entering each takes longer than a small operator.
    _UNSEEING = torch._C._dispatch_tls_local_exclude_set().add(torch._C.DispatchKey.AutocastCPU)

MOVES = 3
"""How often the inputs are moved by a rounding to find how far results may be off."""


def unseen(function: Callable[..., T], *args: Any) -> T:
    """Call a function unseen by the program's modes, autograd and autocast."""
    with torch._C.DisableTorchFunction(), ExcludeDispatchKeyGuard(_UNSEEING):
        return function(*args)


def run(op: Any, copies: Copies) -> Any:
    """Run an operator on the CPU."""
    return op._op(*copies.args, **copies.kwargs)


def moved(op: Any, inputs: Inputs, place: Any) -> tuple[list[Any], Any] | None:
    """Return results in float64 for inputs moved by up to one rounding, and for the inputs.

    Args:
        op: The operator.
        inputs: Its arguments.
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
