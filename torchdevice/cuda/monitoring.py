"""Readings of NVIDIA's management library (NVML), for ``torch/cuda/__init__.py``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.fidelity import Fidelity
from torchdevice.patching import Patch, Replaced, replaced_function


def _utilization(context: Context, original: Any, device: Any = None) -> int:
    import psutil

    context.report("torch.cuda.utilization", "processor utilization", Fidelity.APPROXIMATE)
    return round(psutil.cpu_percent())


_REMEDY = "NVIDIA's management library measures it on NVIDIA's GPUs only. Leave it out, or use psutil."


def refuses(owner: Any, name: str, remedy: str) -> Replaced:
    """Return the patch that makes ``owner.name`` raise :class:`NotSupportedError` with a remedy."""

    def refuse(context: Context, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
        thread_state.refuse(f"{owner.__module__ if isinstance(owner, type) else owner.__name__}.{name}", remedy)

    return replaced_function(owner, name, refuse, native_to="cuda")


def patches() -> list[Patch]:
    """Return the patches of the readings."""
    return [
        replaced_function(torch.cuda, "utilization", _utilization, native_to="cuda"),
        *(refuses(torch.cuda, name, _REMEDY) for name in ("temperature", "power_draw", "clock_rate", "memory_usage")),
    ]
