"""The versions of CUDA and NCCL that programs compare before they use them: those of the build, or constants."""

from __future__ import annotations

import torch
import torch.cuda.nccl

from torchdevice.core import Context, replaces, supplied_function, supplied_value
from torchdevice.foundation.fidelity import Fidelity

CUDA = "12.8"
"""The version in a build of torch without CUDA."""


@supplied_value("torch.version.cuda", Fidelity.DECLARED)
def cuda(context: Context) -> str:
    """Return the CUDA version of the build, or 12.8 in a build without CUDA."""
    return vars(torch.version).get("cuda") or CUDA


@supplied_function("_cuda_getCompiledVersion", Fidelity.DECLARED)
def get_compiled_version(context: Context) -> int:
    """Return the CUDA version as a number, such as 12080 for 12.8."""
    major, minor = (int(part) for part in cuda(context).split(".")[:2])
    return 1000 * major + 10 * minor


@supplied_function("_nccl_version_suffix", Fidelity.DECLARED)
def nccl_version_suffix(context: Context) -> bytes:
    """Return an empty suffix."""
    return b""


# False, so that torch sums the tensors of several devices without NCCL, whose collectives are refused.
replaces(torch.cuda.nccl, "is_available")(lambda *_: False)
