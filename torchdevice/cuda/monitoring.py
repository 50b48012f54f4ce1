"""Readings of a vendor's management library, such as NVIDIA's NVML, for ``torch/cuda/__init__.py`` and its siblings."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from torchdevice.core import thread_state
from torchdevice.core.context import Context
from torchdevice.core.patching import Patch, Replaced, replaced_function
from torchdevice.foundation.fidelity import Fidelity


def processor_utilization(context: Context, name: str) -> float:
    """Return the percentage of time in which the CPU's cores worked, in place of what ``name`` measures."""
    import psutil

    context.report(name, "processor utilization", Fidelity.APPROXIMATE)
    return psutil.cpu_percent()


def _utilization(context: Context, original: Any, device: Any = None) -> int:
    return round(processor_utilization(context, "torch.cuda.utilization"))


_REMEDY = "NVIDIA's management library measures it on NVIDIA's GPUs only. Leave it out, or use psutil."


def refuses(owner: Any, name: str, remedy: str, *, native_to: str = "cuda") -> Replaced:
    """Return the patch that makes ``owner.name`` raise :class:`NotSupportedError` with a remedy."""

    def refuse(context: Context, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
        thread_state.refuse(f"{owner.__module__ if isinstance(owner, type) else owner.__name__}.{name}", remedy)

    return replaced_function(owner, name, refuse, native_to=native_to)


def patches() -> list[Patch]:
    """Return the patches of the readings."""
    return [
        replaced_function(torch.cuda, "utilization", _utilization, native_to="cuda"),
        *(refuses(torch.cuda, name, _REMEDY) for name in ("temperature", "power_draw", "clock_rate", "memory_usage")),
    ]
