"""The CUDA runtime module, for ``torch.cuda.cudart()`` and ``torch/cuda/profiler.py``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.lowlevel.object_fields import word_at
from torchdevice.torch_modules.cuda.memory import mem_get_info
from torchdevice.torch_modules.cuda.streams import create_external


class CudaError(enum.IntEnum):
    """Result codes of the CUDA runtime. Any number is one: torch converts every return value."""

    success = 0

    @classmethod
    def _missing_(cls, value: object) -> CudaError | None:
        if not isinstance(value, int):
            return None
        code = int.__new__(cls, value)
        code._name_, code._value_ = f"error_{value}", value
        return code


_TEXTS = {
    0: "no error",
    1: "invalid argument",
    2: "out of memory",
    3: "initialization error",
    100: "no CUDA-capable device is detected",
    101: "invalid device ordinal",
    400: "invalid resource handle",
    600: "device not ready",
    700: "an illegal memory access was encountered",
    710: "device-side assert triggered",
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
    719: "unspecified launch failure",
    900: "operation not permitted when stream is capturing",
}
"""The texts of ``cudaGetErrorString`` (driver_types.h of the CUDA toolkit)."""

_INVALID_HANDLE = CudaError(400)
_ALREADY_REGISTERED = CudaError(712)
_NOT_REGISTERED = CudaError(713)


@replaces(torch.cuda, "_cudart", makes=True)
class Cudart:
    """The CUDA runtime module, as ``torch.cuda.cudart()`` returns it.

    All threads share the attribute ``torch.cuda._cudart``. A thread in a scope gets the stand-in's
    functions. Other threads get those of the build's own module, which is None in a build without
    CUDA.
    """

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        context = thread_state.state.for_cuda
        if context is None:
            return getattr(self._original, name)
        if name == "cudaError":
            return CudaError
        if name not in _CUDART:
            thread_state.refuse(
                f"torch.cuda.cudart().{name}", "It needs the CUDA runtime. Use a torch function."
            )
        return context.supplied.bound(_CUDART[name])

    def __bool__(self) -> bool:
        return thread_state.state.for_cuda is not None or self._original is not None


def _success(context: Context, *args: Any) -> CudaError:
    return CudaError.success


def _done(found: object, error: CudaError) -> CudaError:
    return error if found is None else CudaError.success


def _host_register(context: Context, address: int, size: int, flags: int) -> CudaError:
    """Lock the pages of some memory of the host: tensors in it say that they are pinned."""
    ranges = context.pinned.registered
    if any(start < address + size and address < start + length for start, length in ranges.items()):
        return _ALREADY_REGISTERED
    ranges[address] = size
    return CudaError.success


def _stream_create(context: Context, place: int) -> CudaError:
    """Write the handle of a new stream to an address."""
    if not context.runtime.supplied.has_handles:
        thread_state.refuse(
            "torch.cuda.cudart().cudaStreamCreate",
            "There is no cudaStream_t. Use torch.cuda.Stream.",
        )
    word_at(int(place)).value = create_external(context)
    return CudaError.success


def _host_unregister(context: Context, address: int) -> CudaError:
    return _done(context.pinned.registered.pop(address, None), _NOT_REGISTERED)


def _stream_destroy(context: Context, handle: int) -> CudaError:
    return _done(context.streams.handles.pop(handle, None), _INVALID_HANDLE)


_CUDART: dict[str, Callable[..., Any]] = {
    "cudaGetErrorString": lambda context, error: _TEXTS.get(int(error), "unrecognized error code"),
    "cudaMemGetInfo": mem_get_info,
    "cudaProfilerStart": _success,
    "cudaProfilerStop": _success,
    "cudaHostRegister": _host_register,
    "cudaHostUnregister": _host_unregister,
    "cudaStreamCreate": _stream_create,
    "cudaStreamDestroy": _stream_destroy,
}
