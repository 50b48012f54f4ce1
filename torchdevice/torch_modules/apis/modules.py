"""Moves and copies of modules, attention's fast paths (``torch/nn``); ``torch/optim``.

torch allows ``capturable=True`` of optimizers on a list of devices, and groups their tensors by
devices, which it reads in C++.

torch also allows ``flex_attention`` on a list of devices, and with a gradient on fewer. Its eager
form runs on any device, with a gradient too: it is what CUDA runs where the call is not compiled.
Where the call is compiled and Inductor has no backward for the target,
``torch_modules/compile/dynamo.py`` runs the graph as it is.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.utils._foreach_utils

from torchdevice.calls import moves, traced
from torchdevice.calls.rewriters import native_device
from torchdevice.calls.wrap import EntryPoint
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import per_context
from torchdevice.torch_modules.apis.factories import rewrites_calls


@replaces(torch.nn.Module, "_apply")
def _apply(
    context: Context, original: Any, self: torch.nn.Module, *args: Any, **kwargs: Any
) -> torch.nn.Module:
    """``Module._apply``, which moves a module's parameters and buffers.

    Where a move may have nothing to do, a parameter keeps its memory if nothing else holds that
    memory (:mod:`torchdevice.calls.moves`).
    """
    if not (context.runtime.shares_host_memory or context.devices.are_folded):
        return original(self, *args, **kwargs)
    context.thread.moving_module += 1
    try:
        return original(self, *args, **kwargs)
    finally:
        context.thread.moving_module -= 1


@replaces(torch.nn.Parameter, "__deepcopy__")
def _deepcopy(context: Context, original: Any, self: torch.nn.Parameter, memo: Any) -> Any:
    """``Parameter.__deepcopy__``: mark the copy as the parameter is; it may never be moved."""
    result = original(self, memo)
    return moves.followed(self, result) if context.runtime.shares_host_memory else result


@replaces(torch.overrides, "has_torch_function", makes=True, by_value=True)
class _HasTorchFunction(EntryPoint):
    """``torch.overrides.has_torch_function``, with which attention and encoders pick a fast path.

    It is True where any mode is on torch's stack, and the scope's is none of the program's. The
    paths differ in more than time: after the fast one an encoder's results are 0 at padded places,
    and only it takes nested tensors. Modules that import it by value, such as
    ``torch.nn.functional``, hand calls over to the scope's mode by it. It has nothing to do in
    collectives, which take no device.
    """

    def __call__(self, /, relevant_args: Any) -> bool:
        answer: bool = self.original(relevant_args)
        caller = sys._getframe(1).f_globals
        if not answer or ("has_torch_function" in caller and caller["__name__"] != _COLLECTIVES):
            return answer
        for mode in thread_state.stacked_modes():
            if not isinstance(mode, thread_state.ContextMode):
                return True
        # The classes to which torch hands calls over.
        for kind in {*map(type, relevant_args)} - {torch.Tensor}:
            if getattr(kind, "__torch_function__", _DISABLED) is not _DISABLED:
                return True
        return False


_COLLECTIVES = "torch.distributed.distributed_c10d"

_DISABLED = torch._C._disabled_torch_function_impl


# Torch.optim deletes it as an attribute.
_OPTIMIZER = importlib.import_module("torch.optim.optimizer")


@replaces(_OPTIMIZER, "_get_capturable_supported_devices", native_to="cuda", by_value=True)
def _capturable_devices(context: Context, original: Any, supports_xla: bool = True) -> list[str]:
    """Return torch's list of device types for ``capturable=True``, with the target's added."""
    return [*original(supports_xla), context.device_type, context.names.family]


@replaces(torch.utils._foreach_utils, "_group_tensors_by_device_and_dtype", by_value=True)
def _groups(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return tensors in groups, with the devices that the tensors report."""
    found = original(*args, **kwargs)
    if context.shown_as is None or not rewrites_calls():
        return found
    return {
        (context.devices.shown(device), dtype): group for (device, dtype), group in found.items()
    }


def _validate_device(context: Context, original: Any, query: Any, key: Any, value: Any) -> None:
    if native_device(query).type != context.device_type:
        original(query, key, value)
    elif (
        any(each.requires_grad for each in (query, key, value))
        and not context.runtime.support.compiles_flex_backward
    ):
        context.report("flex_attention with a gradient", "its eager form", Fidelity.EXACT)


@replaces("torch.nn.attention.flex_attention", "_validate_device", makes=True)
def _make(original: Any) -> Any:
    return traced.with_nothing_in_place(per_context(original, _validate_device))


@replaces("torch._higher_order_ops.flex_attention", "create_fw_bw_graph")
def _create_graph(context: Context, original: Any, *args: Any) -> Any:
    """Derive ``score_mod`` with torch's mode for tensor indices: compiled code takes modes off."""
    with torch._C._EnableTorchFunction():
        return original(*args)
