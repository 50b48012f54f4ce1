"""The CUDA runtime module, for ``torch.cuda.cudart()`` and ``torch/cuda/profiler.py``."""

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

    All threads share the attribute ``torch.cuda._cudart``. A thread in a scope gets the stand-in's functions. Other
    threads get those of the build's own module, which is None in a build without CUDA.
    """

    cudaError = CudaError

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        context = thread_state.state.for_cuda
        if context is None:
            return getattr(self._original, name)
        if name not in _CUDART:
            thread_state.refuse(f"torch.cuda.cudart().{name}", "It needs the CUDA runtime. Use a torch function.")
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
