"""Versions that programs compare before they use CUDA: those of the build, where it has any."""

from __future__ import annotations

import torch

from torchdevice.context import Context
from torchdevice.fidelity import Fidelity
from torchdevice.supplied import supplied_function, supplied_value

CUDA = "12.8"


@supplied_value("torch.version.cuda", Fidelity.DECLARED)
def cuda(context: Context) -> str:
    """The version of the build, or 12.8."""
    return vars(torch.version).get("cuda") or CUDA


@supplied_function("_cuda_getCompiledVersion", Fidelity.DECLARED)
def get_compiled_version(context: Context) -> int:
    """The version of CUDA as a number: 12080 for 12.8."""
    major, minor = (int(part) for part in cuda(context).split(".")[:2])
    return 1000 * major + 10 * minor
