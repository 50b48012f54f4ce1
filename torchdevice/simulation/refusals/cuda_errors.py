"""CUDA's errors: their texts, and what a device is after one that CUDA does not recover from."""

from __future__ import annotations

import torch

_SUFFIX = (
    "\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to "
    "enable device-side assertions.\n"
)
"""The sentences that torch adds to CUDA's own text (c10/cuda/CUDAException.cpp, CUDAMiscFunctions.cpp)."""

DEVICE_ASSERT = ("device-side assert triggered", "cudaErrorAssert")
ILLEGAL_ADDRESS = ("an illegal memory access was encountered", "cudaErrorIllegalAddress")
INVALID_CONFIGURATION = ("invalid configuration argument", "cudaErrorInvalidConfiguration")
INITIALIZATION = ("initialization error", "cudaErrorInitializationError")
"""CUDA's text of an error, and its name in ``cudaError_t``."""


def cuda_error(kind: tuple[str, str], note: str) -> torch.AcceleratorError:
    """Return the error that torch raises for one of CUDA's, with a note on the cause."""
    text, name = kind
    error = torch.AcceleratorError(f"CUDA error: {text}{_SUFFIX.format(name=name)}")
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    return error
