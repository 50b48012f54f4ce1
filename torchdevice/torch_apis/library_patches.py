"""Code of libraries that decides by a device's type what is switched on, and knows the type ``"cuda"`` only.

Lightning raises where a device that it made as ``torch.device("cuda")`` is not of the type ``"cuda"``, and accelerate
leaves mixed precision off there. Both keep the target's device, which the tensors of the scope report too. Only the
functions that check see the program's device.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.core import thread_state
from torchdevice.core.bindings import later, replaces
from torchdevice.core.context import Context
from torchdevice.core.patching import Patch, Replaced
from torchdevice.engines import moves
from torchdevice.foundation.per_thread import PerThread, having


def _as_program(context: Context, device: Any) -> Any:
    """Return the program's spelling for a device of the target, and any other device unchanged."""
    if not isinstance(device, torch.device) or not context.is_targets(device):
        return device
    if context.runtime.shares_host_memory and moves.side_meant(context, device, None) is not moves.Side.DEVICE:
        return device
    return context.program_device(context.thread.device_index if device.index is None else device.index)


# ---- Lightning -------------------------------------------------------------------------------------------------------


def _setup_device(context: Context, original: Any, self: Any, device: torch.device) -> None:
    original(self, _as_program(context, device))


for _package in ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"):
    _class = f"{_package}.accelerators.cuda:CUDAAccelerator"
    replaces(_class, "setup_device", native_to="cuda", sees_scope=True)(_setup_device)


# ---- accelerate ------------------------------------------------------------------------------------------------------


_checking = PerThread(is_on=False)


@replaces("accelerate.accelerator:Accelerator", "__init__", native_to="cuda", sees_scope=True)
@replaces("accelerate.accelerator", "get_mixed_precision_context_manager", native_to="cuda", sees_scope=True)
def _while_checking(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of accelerate in which the device of its state is the program's."""
    with having(_checking, is_on=True):
        return original(*args, **kwargs)


class _DeviceOfState:
    """The attribute ``device`` of accelerate's states. It is in the state's dictionary; a check sees the program's."""

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None or "device" not in vars(state):
            raise AttributeError("device")  # as without the attribute; Python then calls __getattr__ of a state
        device = vars(state)["device"]
        context = thread_state.state.context
        return _as_program(context, device) if _checking.is_on and context is not None else device

    def __set__(self, state: Any, device: Any) -> None:
        vars(state)["device"] = device

    def __delete__(self, state: Any) -> None:
        del vars(state)["device"]


@later("accelerate.state", sees_scope=True)
def _patches_of_state(module: Any) -> list[Patch]:
    attribute = _DeviceOfState()
    return [
        Replaced(owner, "device", lambda original: attribute, may_be_absent=True)
        for owner in (module.PartialState, module.AcceleratorState)
    ]
