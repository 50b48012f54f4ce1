"""Names that are equal on all stand-in devices: constants and versions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.cuda.nccl

from torchdevice.kernel.bindings import replaces, supplied_function, supplied_value
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.fidelity import Fidelity


def _supply(name: str, fidelity: Fidelity, value: Any, note: str) -> None:
    def constant(context: Context) -> Any:
        # A copy, since the program may change a table that it gets.
        return copy.deepcopy(value)

    constant.__doc__ = note
    if "." in name:
        supplied_value(name, fidelity)(constant)
        return
    prefix = name.split("_")[1]
    supplied_function(
        name, fidelity, note=note, native_to=prefix if prefix in FAMILIES else "cuda"
    )(constant)


_NO_HOST_MEMORY = {
    "allocations": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    "allocated_bytes": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    "active_requests": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    "active_bytes": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    "num_host_alloc": 0,
    "num_host_free": 0,
    "host_alloc_time": {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0},
    "host_free_time": {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0},
}

_CONSTANTS: Mapping[Fidelity, Mapping[str, tuple[Any, str]]] = {
    Fidelity.EXACT: {
        "torch._C._has_cuda": (
            True,
            "Return True, so that ``torch.backends.cuda.is_built()`` does.",
        ),
        "torch._C._has_gds": (False, "Return False: files cannot be read into storages."),
        "_cuda_getAllocatorBackend": (
            "native",
            'Return `"native"`, the name of CUDA\'s default allocator.',
        ),
        "_cuda_hostMemoryStats": (
            _NO_HOST_MEMORY,
            "Return zeros: no page-locked host memory is allocated.",
        ),
        "_cuda_memoryMetadataSupported": (False, "Return False: recorded events carry no labels."),
        "_cuda_resetAccumulatedHostMemoryStats": (None, "Do nothing: the figures are always 0."),
        "_cuda_resetPeakHostMemoryStats": (None, "Do nothing: the figures are always 0."),
        "_mps_isCaptureEnabled": (False, "Return False: there is no Metal to capture."),
        "_mps_isCapturing": (False, "Return False: there is no Metal to capture."),
        "_xpu_getArchFlags": (None, "Return None: no code for a GPU was compiled."),
    },
    Fidelity.DECLARED: {
        "torch._C._has_cudnn": (
            True,
            "Return True, so that ``torch.backends.cudnn`` lets programs set its flags.",
        )
    },
    Fidelity.INERT: {
        "_cuda_clearCublasWorkspaces": (None, "there are no cuBLAS workspaces"),
        "_cuda_ipc_collect": (None, "no memory is shared by CUDA IPC"),
        "_cuda_lock_mutex": (None, "there is no allocator to lock"),
        "_cuda_unlock_mutex": (None, "there is no allocator to unlock"),
        "_host_emptyCache": (None, "no page-locked host memory is cached"),
        "_mps_profilerStopTrace": (None, "there are no OS signposts"),
        "_mps_stopCapture": (None, "there is no Metal to capture"),
    },
}
"""Names of ``torch._C``, by fidelity, with a value, and the sentence on it in the coverage and the
report.

A dotted name is the value itself, another one a function that returns it.
"""

for _fidelity, _rows in _CONSTANTS.items():
    for _name, (_value, _note) in _rows.items():
        _supply(_name, _fidelity, _value, _note)


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


NCCL = "2.27.3"
"""The version of NCCL whose rules and texts process groups have."""


@supplied_function("_nccl_version", Fidelity.DECLARED)
def nccl_version(context: Context) -> int:
    """Return NCCL 2.27.3 as one packed number."""
    major, minor, patch = map(int, NCCL.split("."))
    return major << 32 | minor << 16 | patch


@supplied_function("_nccl_version_suffix", Fidelity.DECLARED)
def nccl_version_suffix(context: Context) -> bytes:
    """Return an empty suffix."""
    return b""


# False: torch sums several devices' tensors without NCCL, whose collectives are refused.
replaces(torch.cuda.nccl, "is_available")(lambda *_: False)
