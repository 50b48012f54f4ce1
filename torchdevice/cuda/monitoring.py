"""Readings of a vendor's management library, such as NVIDIA's NVML, for ``torch/cuda/__init__.py`` and its siblings."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.core.context import Context
from torchdevice.core.replacing import replaces
from torchdevice.foundation.fidelity import Fidelity


def processor_utilization(context: Context, name: str) -> float:
    """Return the percentage of time in which the CPU's cores worked, in place of what ``name`` measures."""
    import psutil

    context.report(name, "processor utilization", Fidelity.APPROXIMATE)
    return psutil.cpu_percent()


@replaces(torch.cuda, "utilization")
def _utilization(context: Context, original: Any, device: Any = None) -> int:
    return round(processor_utilization(context, "torch.cuda.utilization"))
