"""CUDA's errors: their texts, and a device's state after one that CUDA does not recover from."""

from __future__ import annotations

import torch

from torchdevice.kernel.python.uncaught_errors import add_note

DEVICE_ASSERT = ("device-side assert triggered", "cudaErrorAssert")
ILLEGAL_ADDRESS = ("an illegal memory access was encountered", "cudaErrorIllegalAddress")
INVALID_VALUE = ("invalid argument", "cudaErrorInvalidValue")
INITIALIZATION = ("initialization error", "cudaErrorInitializationError")
"""CUDA's text of an error, and its name in ``cudaError_t``."""


_AFTER_AN_ERROR_OF_CUDA = (
    "\n"
    "Search for `{name}' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html "
    "for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def cuda_error(kind: tuple[str, str], note: str) -> torch.AcceleratorError:
    """Return the error that torch raises for one of CUDA's, with a note on the cause."""
    of_cuda, name = kind
    # Torch's addition to CUDA's own text: c10/cuda/CUDAException.cpp, CUDAMiscFunctions.cpp.
    error = torch.AcceleratorError(
        f"CUDA error: {of_cuda}{_AFTER_AN_ERROR_OF_CUDA.format(name=name)}"
    )
    add_note(error, note)
    return error
