"""``torch.nn.DataParallel`` and ``DistributedDataParallel`` on targets they do not support."""

from __future__ import annotations

import importlib
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity


# Not as an attribute: torch.nn.parallel.data_parallel is a function of that name.
@replaces(
    importlib.import_module("torch.nn.parallel.data_parallel"),
    "_get_available_device_type",
    native_to="cuda",
)
def _available_device_type(context: Context, original: Any) -> str | None:
    """Return None on a CPU target, so that ``DataParallel`` runs the module once."""
    if not context.runtime.shares_host_memory:
        return original()
    context.report("DataParallel", "the module runs once", Fidelity.APPROXIMATE)
    return None


@replaces(DistributedDataParallel, "__init__", native_to="cuda")
def _init_ddp(
    context: Context,
    original: Any,
    self: Any,
    module: Any,
    device_ids: Any = None,
    output_device: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """``DistributedDataParallel``: replace ``device_ids`` and ``output_device`` the target lacks.

    torch refuses them for a CPU module. They may be ordinals of devices that the scope advertises
    beyond the real ones; then the device of the module takes their place, because torch moves
    inputs to it.
    """
    if (
        not context.runtime.takes_device_ids
        or context.devices.count > context.runtime.device_count()
    ):
        # An ordinal beyond the real devices would be refused by torch, and on a CPU every ordinal.
        device_ids, output_device = _of_module(context, module) if device_ids else None, None
    original(self, module, device_ids, output_device, *args, **kwargs)
    context.runtime.supplied.serve_reducer(self)


@replaces("torch._C._distributed_c10d:Logger", "set_runtime_stats_and_log", native_to="cuda")
def _log_times(context: Context, original: Any, self: Any) -> None:
    """``Logger.set_runtime_stats_and_log``, which warns that step times are not measured here."""
    if context.runtime.shares_host_memory:
        original(self)


@replaces(DistributedDataParallel, "_register_builtin_comm_hook", native_to="cuda")
def _register_builtin_comm_hook(
    context: Context, original: Any, self: Any, comm_hook_type: Any
) -> None:
    """Register a Python hook of torch's: its C++ hooks take only results of groups in C++."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    # `None` stands for the default group; DDP's own group may be another one.
    self.register_comm_hook(
        self.process_group, getattr(default_hooks, f"{comm_hook_type.name.lower()}_hook")
    )


def _of_module(context: Context, module: Any) -> list[int] | None:
    """Return the ordinal of the device of a module, None on a CPU target."""
    if context.runtime.shares_host_memory:
        return None
    # `[:1] or None`: a module without parameters has no device.
    return [parameter.device.index or 0 for parameter in module.parameters()][:1] or None
