"""Sends tensors of the device to other processes by ``torch.multiprocessing``, as values in shared memory.

CUDA shares the tensor's memory. Here the receiver gets a copy on its own device with that ordinal, so the sender does
not see what the receiver writes.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing.reductions

from torchdevice.core import thread_state
from torchdevice.errors import ScopeError
from torchdevice.foundation.fidelity import Fidelity
from torchdevice.simulation import policy

_reduce_tensor = torch.multiprocessing.reductions.reduce_tensor


def register() -> None:
    """Let the pickler of ``torch.multiprocessing`` reduce tensors of the device, in all threads of the process."""
    # A queue pickles in a thread of its own, where no scope need be active.
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        if tensor.device.type != policy.DEVICE_TYPE:
            return _reduce_tensor(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            return _reduce_tensor(tensor.cpu())  # which torch refuses
        if policy.stands_for_mps():
            raise RuntimeError("_share_filename_: only available on CPU")
        context = thread_state.state.context
        if context is not None:
            entry = context.note("a tensor for another process", "a copy of it", Fidelity.APPROXIMATE)
            if entry is not None:
                entry.bytes += tensor.nbytes
        values, index = tensor.detach().cpu(), tensor.device.index
        return _received, (values, index, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))


def _received(values: torch.Tensor, index: int, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    context = thread_state.state.context
    if context is None:
        raise ScopeError(
            "a tensor of a simulated device was sent to a process in which no scope is active. Start the process in a "
            "scope, or after enable(propagate=True)."
        )
    tensor = values.to(context.device(index))
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
