"""Process groups: gloo replaces NCCL, which needs CUDA, and ``get_backend()`` still returns ``"nccl"``."""

from __future__ import annotations

import os
import types
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.core.context import Context
from torchdevice.core.importing import WhenImported
from torchdevice.core.patching import Patch, Replaced, per_context, replaced_function, replaced_in_importers
from torchdevice.foundation.fidelity import Fidelity

_asked_for: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # weak: destroyed groups end
"""Process group -> the backend that the program asked for, where another one stands in."""


def _stand_in(context: Context, backend: Any) -> tuple[Any, str | None]:
    """Return the backend to use, and the name that :func:`torch.distributed.get_backend` answers for another one."""
    from torchdevice.torch_apis.distributed import nccl_on_gloo  # not before it is known that torch has process groups

    names = str(backend).lower() if backend is not None else ""
    if "nccl" in names:
        context.report(f"process group {names!r}", "gloo", Fidelity.APPROXIMATE)
        return nccl_on_gloo.register(takes_cpu="gloo" in names), "nccl"
    if "gloo" in names and not context.runtime.shares_host_memory:
        return nccl_on_gloo.register(takes_cpu=True), "gloo"
    return backend, None


def _init_process_group(context: Context, original: Any, backend: Any = None, *args: Any, **kwargs: Any) -> None:
    # Without a name torch makes both, for a machine that has CUDA.
    used, asked = _stand_in(context, "cpu:gloo,cuda:nccl" if backend is None else backend)
    kwargs.pop("device_id", None)  # lets NCCL connect at once
    # Options of NCCL's class, which gloo refuses.
    if asked == "nccl":
        kwargs.pop("pg_options", None)
    original(used, *args, **kwargs)
    _remember(dist.distributed_c10d._get_default_group(), asked)


def _new_group(
    context: Context,
    original: Any,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    used, asked = _stand_in(context, backend)
    kwargs.pop("device_id", None)
    if backend is None and dist.is_initialized():
        # A new group without a backend takes the default group's, and answers the same name.
        asked = _asked_for.get(dist.distributed_c10d._get_default_group())
    if asked == "nccl":
        kwargs.pop("pg_options", None)
    group = original(ranks, timeout, used, *args, **kwargs)
    _remember(group, asked)
    return group


def _remember(group: Any, asked: str | None) -> None:
    if asked is not None and isinstance(group, dist.ProcessGroup):  # not where this rank is no member
        _asked_for[group] = asked


def _get_backend(context: Context, original: Any, group: Any = None) -> Any:
    found = original(group)
    # None means the default group.
    asked = _asked_for.get(group or dist.distributed_c10d._get_default_group())
    return found if asked is None else dist.Backend(asked)


def _default_backend(context: Context, original: Any, device: Any) -> str:
    """``get_default_backend_for_device``: for the target, the backend of the program's accelerator."""
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    is_target = context.is_targets_type(kind) and not context.runtime.shares_host_memory
    return original(context.program_device(0) if is_target or kind == context.program else device)


def _attach_flight_recorder(context: Context, original: Any, group: Any, *args: Any, **kwargs: Any) -> None:
    """Leave groups written in Python out: the recorder of torch 2.15 looks for a backend in C++ in each group."""
    from torchdevice.torch_apis.distributed.nccl_on_gloo import NcclOnGloo

    if not isinstance(group, NcclOnGloo):
        original(group, *args, **kwargs)


class ProcessGroupNCCL:
    """NCCL's class, in builds of torch without NCCL. Programs make options of it; no group is an instance of it."""

    class Options:
        """Settings for NCCL, which gloo does not read."""

        def __init__(self, is_high_priority_stream: bool = False):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = types.SimpleNamespace()


def _patches_of_absent_class() -> list[Patch]:
    """Return the patches for the functions of torch, and programs, that name the class where NCCL is available."""
    name = "ProcessGroupNCCL"
    absent = [module for module in (dist.distributed_c10d, dist) if not hasattr(module, name)]
    return [Replaced(module, name, lambda original: ProcessGroupNCCL, may_be_absent=True) for module in absent]


def _init_loader(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``_OverlappingCpuLoader``, which takes only tensors of the type ``"cuda"`` to the CPU to write them to a file."""
    original(self, *args, **kwargs)
    # On a CPU target nothing has to be taken to the CPU.
    if not context.runtime.shares_host_memory:
        self.device_type = context.shown_as or context.device_type


def _move_flat_parameter(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``FlatParamHandle.flat_param_to``: FSDP frees the memory of the parameter that it has moved to the CPU."""
    if context.runtime.shares_host_memory:
        # The parameter's memory is the same after the "move", so FSDP would free the parameter itself.
        self.flat_param.data = self.flat_param.detach().clone()
    original(self, *args, **kwargs)


def _device_handle(context: Context, original: Any, cls: type, device: Any) -> Any:
    """``_FSDPDeviceHandle.from_device``: the program's module, because ``torch.cpu`` has streams without methods."""
    return getattr(torch, context.program) if context.is_targets(device) else original(cls, device)


def _module_of_type(context: Context, original: Any, device_type: str = "cuda") -> Any:
    """``_get_device_handle`` and ``_get_device_module``: the program's module, because ``torch.mps`` has no streams."""
    lacks = bool(context.runtime.lacks_in_module) and context.is_targets_type(device_type)
    return getattr(torch, context.program) if lacks else original(device_type)


def _set_up_mesh(context: Context, original: Any, self: Any) -> Any:
    """``DeviceMesh``, which chooses the device of this rank where the program has not used CUDA yet.

    torch asks ``torch.cuda.is_initialized()``, which is true in scopes.
    """
    # Read before torch's own set-up, which uses the accelerator.
    chosen, count = context.is_initialized, context.device_count
    group = original(self)
    # As torch does: the launcher's variable first, else by the rank.
    index = int(os.environ.get("LOCAL_RANK", dist.get_rank() % max(1, count)))
    of_accelerator = self._device_type == context.program or context.is_targets_type(self._device_type)
    if of_accelerator and not chosen and index < count:
        context.thread.select(index)
    return group


def _patches_of_meshes(module: ModuleType) -> list[Patch]:
    return [
        replaced_function(module.DeviceMesh, "_setup_world_group_and_device", _set_up_mesh, native_to="cuda"),
        replaced_in_importers(module, "_get_device_handle", _module_of_type, native_to="cuda"),
    ]


def _patches_of_device_handles(module: ModuleType) -> list[Patch]:
    def make(original: Any) -> Any:
        # `from_device` is a class method.
        return classmethod(per_context(original.__func__, _device_handle, native_to="cuda"))

    return [Replaced(module._FSDPDeviceHandle, "from_device", make)]


def _patches_of_flat_parameters(module: ModuleType) -> list[Patch]:
    return [replaced_function(module.FlatParamHandle, "flat_param_to", _move_flat_parameter, native_to="cuda")]


def _patches_of_checkpoints(module: ModuleType) -> list[Patch]:
    return [replaced_function(module._OverlappingCpuLoader, "__init__", _init_loader, native_to="cuda")]


def patches() -> list[Patch]:
    """Return the patches of ``torch.distributed``; an empty list in a build without it."""
    if not dist.is_available():
        return []
    functions: dict[str, Callable[..., Any]] = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "get_backend": _get_backend,
        "is_nccl_available": lambda context, original: True,
        "get_default_backend_for_device": _default_backend,
    }
    if hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"):  # torch 2.15 and later
        functions["_maybe_attach_flight_recorder"] = _attach_flight_recorder
    return [
        replaced_in_importers(torch._utils, "_get_device_module", _module_of_type, native_to="cuda"),
        WhenImported("torch.distributed.checkpoint.filesystem", _patches_of_checkpoints),
        WhenImported("torch.distributed.device_mesh", _patches_of_meshes),
        WhenImported("torch.distributed.fsdp._common_utils", _patches_of_device_handles),
        WhenImported("torch.distributed.fsdp._flat_param", _patches_of_flat_parameters),
        *_patches_of_absent_class(),
        *(
            replaced_in_importers(dist.distributed_c10d, name, replacement, native_to="cuda")
            for name, replacement in functions.items()
        ),
    ]
