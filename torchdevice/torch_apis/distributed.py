"""Process groups: gloo replaces NCCL, which needs CUDA, and ``get_backend()`` still returns ``"nccl"``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torchdevice.context import Context
from torchdevice.fidelity import Fidelity
from torchdevice.patching import Patch, replaced_function

_asked_for_nccl: weakref.WeakSet[Any] = weakref.WeakSet()


def _stand_in(context: Context, backend: Any) -> tuple[Any, bool]:
    """Return the backend to use, and whether the program requested NCCL."""
    names = str(backend).lower() if backend is not None else ""
    if "nccl" in names:
        context.report(f"process group {names!r}", context.runtime.collectives, Fidelity.APPROXIMATE)
        return context.runtime.collectives, True
    # A simulated device has a backend of its own, which a program that requests gloo needs as well.
    return context.runtime.collectives if "gloo" in names else backend, False


def _init_process_group(context: Context, original: Any, backend: Any = None, *args: Any, **kwargs: Any) -> None:
    used, nccl = _stand_in(context, "nccl" if backend is None else backend)
    if not context.runtime.takes_device_ids:
        kwargs.pop("device_id", None)  # torch refuses the CPU as device_id
    if nccl:
        kwargs.pop("pg_options", None)  # options of NCCL's class
    original(used, *args, **kwargs)
    if nccl:
        _asked_for_nccl.add(dist.distributed_c10d._get_default_group())


def _new_group(
    context: Context,
    original: Any,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    used, nccl = _stand_in(context, backend)
    if not context.runtime.takes_device_ids:
        kwargs.pop("device_id", None)
    group = original(ranks, timeout, used, *args, **kwargs)
    inherits = (
        backend is None and dist.is_initialized() and dist.distributed_c10d._get_default_group() in _asked_for_nccl
    )
    # A process that is not in the group gets a placeholder, which is no ProcessGroup.
    if (nccl or inherits) and isinstance(group, dist.ProcessGroup):
        _asked_for_nccl.add(group)
    return group


def _get_backend(context: Context, original: Any, group: Any = None) -> Any:
    found = original(group)
    asked = group or dist.distributed_c10d._get_default_group()
    return dist.Backend("nccl") if asked in _asked_for_nccl else found


def _is_nccl_available(context: Context, original: Any) -> bool:
    return True


def patches() -> list[Patch]:
    """Return the patches of ``torch.distributed``; an empty list in a build without it."""
    if not dist.is_available():
        return []
    functions: dict[str, Callable[..., Any]] = {
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "get_backend": _get_backend,
        "is_nccl_available": _is_nccl_available,
    }
    return [
        replaced_function(module, name, replacement, native_to="cuda")
        for name, replacement in functions.items()
        for module in (dist.distributed_c10d, dist)
    ]
