"""NCCL's version, for ``torch/cuda/nccl.py``. Its collectives between the devices of one process are refused."""

from __future__ import annotations

from typing import Any

import torch.cuda.nccl

from torchdevice.core.bindings import supplied_function
from torchdevice.core.context import Context
from torchdevice.core.replacing import replaces
from torchdevice.foundation.fidelity import Fidelity


@supplied_function("_nccl_version_suffix", Fidelity.DECLARED)
def nccl_version_suffix(context: Context) -> bytes:
    """Return an empty suffix."""
    return b""


@replaces(torch.cuda.nccl, "is_available")
def _is_available(*_: Any) -> bool:
    """Return False, so that torch sums the tensors of several devices without NCCL."""
    return False
