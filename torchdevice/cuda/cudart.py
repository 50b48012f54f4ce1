"""The CUDA runtime module. For ``torch.cuda.cudart()`` and ``torch/cuda/profiler.py``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.cuda.memory import mem_get_info
from torchdevice.patching import Patch, Replaced


class CudaError(enum.IntEnum):
    """The result codes of the CUDA runtime that ``torch.cuda`` compares with."""

    success = 0


class Cudart:
    """The CUDA runtime module, as ``torch.cuda.cudart()`` returns it.

    Stays in ``torch.cuda`` for all threads, so it answers by the scope of the thread that asks and is the build's own
    module (None in a build without CUDA) for the others.
    """

    cudaError = CudaError

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        context = thread_state.state.for_cuda
        if context is None:
            return getattr(self._original, name)
        if name not in _CUDART:
            thread_state.refuse(f"torch.cuda.cudart().{name}", "There is no CUDA runtime behind a stand-in device.")
        return context.bound(_CUDART[name])

    def __bool__(self) -> bool:
        return thread_state.state.for_cuda is not None or self._original is not None


def _get_error_string(context: Context, error: int) -> str:
    return "no error" if error == 0 else f"error {int(error)}"


def _success(context: Context, *args: Any) -> CudaError:
    return CudaError.success


_CUDART: dict[str, Callable[..., Any]] = {
    "cudaGetErrorString": _get_error_string,
    "cudaMemGetInfo": mem_get_info,
    "cudaProfilerStart": _success,
    "cudaProfilerStop": _success,
    "cudaHostRegister": _success,
    "cudaHostUnregister": _success,
}


def patches() -> list[Patch]:
    """Return the patch of ``torch.cuda.cudart()``."""
    return [Replaced(torch.cuda, "_cudart", Cudart)]
