"""Code of libraries that decides by a device's type what is switched on, and knows the type ``"cuda"`` only.

Lightning raises where a device that it made as ``torch.device("cuda")`` is not of the type ``"cuda"``, and accelerate
leaves mixed precision off there. Both keep the target's device, which the tensors of the scope report too. Only the
functions that check see the program's device.
"""

from __future__ import annotations

import functools
import threading
from types import ModuleType
from typing import Any

import torch

from torchdevice.core import thread_state
from torchdevice.core.context import Context
from torchdevice.core.importing import WhenImported
from torchdevice.core.patching import Patch, Replaced, replaced_function
from torchdevice.engines import moves


def _as_program(context: Context, device: Any) -> Any:
    """Return the program's spelling for a device of the target, and any other device unchanged."""
    if not isinstance(device, torch.device) or not context.is_targets(device):
        return device
    if context.runtime.shares_host_memory and moves.side_meant(context, device, None) is not moves.Side.DEVICE:
        return device
    return context.program_device(context.thread.device_index if device.index is None else device.index)


# ---- Lightning -------------------------------------------------------------------------------------------------------

_LIGHTNING = (
    "lightning.fabric.accelerators.cuda",
    "lightning.pytorch.accelerators.cuda",
    "lightning_fabric.accelerators.cuda",
    "pytorch_lightning.accelerators.cuda",
)


def _setup_device(context: Context, original: Any, self: Any, device: torch.device) -> None:
    original(self, _as_program(context, device))


def _patches_of_lightning(module: ModuleType) -> list[Patch]:
    return [replaced_function(module.CUDAAccelerator, "setup_device", _setup_device, native_to="cuda")]


# ---- accelerate ------------------------------------------------------------------------------------------------------


class _Checking(threading.local):
    depth = 0


_checking = _Checking()


def _while_checking(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of accelerate in which the device of its state is the program's."""
    _checking.depth += 1
    try:
        return original(*args, **kwargs)
    finally:
        _checking.depth -= 1


class _DeviceOfState:
    """The attribute ``device`` of accelerate's states. It is in the state's dictionary; a check sees the program's."""

    def __get__(self, state: Any, owner: type) -> Any:
        if state is None or "device" not in vars(state):
            raise AttributeError("device")  # as without the attribute; Python then calls __getattr__ of a state
        device = vars(state)["device"]
        context = thread_state.current()
        return _as_program(context, device) if _checking.depth and context is not None else device

    def __set__(self, state: Any, device: Any) -> None:
        vars(state)["device"] = device

    def __delete__(self, state: Any) -> None:
        del vars(state)["device"]


def _patches_of_state(module: ModuleType) -> list[Patch]:
    attribute = _DeviceOfState()
    return [
        Replaced(owner, "device", lambda original: attribute, may_be_absent=True)
        for owner in (module.PartialState, module.AcceleratorState)
    ]


def _patches_of_accelerator(module: ModuleType) -> list[Patch]:
    checked = functools.partial(replaced_function, replacement=_while_checking, native_to="cuda")
    return [checked(module.Accelerator, "__init__"), checked(module, "get_mixed_precision_context_manager")]


def patches() -> list[Patch]:
    """Return the patches of the libraries, put in where a program imports them."""
    return [
        *(WhenImported(name, _patches_of_lightning, sees_scope=True) for name in _LIGHTNING),
        WhenImported("accelerate.state", _patches_of_state, sees_scope=True),
        WhenImported("accelerate.accelerator", _patches_of_accelerator, sees_scope=True),
    ]
