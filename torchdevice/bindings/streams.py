"""Streams. For ``torch/cuda/__init__.py`` and ``torch/cuda/streams.py``.

A target runs its work in order, so a stream is a name: each has an id, and each thread a current one per device. The
classes are in ``torchdevice/shims/stream_types.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdevice.bindings import supplies
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope

CUDA_DEVICE_TYPE = 1
"""``c10::DeviceType::CUDA``."""


@supplies("_cuda_getCurrentStream")
def get_current_stream(scope: Scope, device: int) -> tuple[int, int, int]:
    """The id of this thread's current stream on the device, the device, and CUDA's device type."""
    _check(scope, device)
    return scope.thread.streams.get(device, 0), device, CUDA_DEVICE_TYPE


@supplies("_cuda_getDefaultStream")
def get_default_stream(scope: Scope, device: int) -> tuple[int, int, int]:
    """Stream 0 of the device."""
    _check(scope, device)
    return 0, device, CUDA_DEVICE_TYPE


@supplies("_cuda_getCurrentRawStream")
def get_current_raw_stream(scope: Scope, device: int) -> int:
    """The null pointer for the default stream; no other stream has one."""
    stream_id, _, _ = get_current_stream(scope, device)
    if stream_id:
        raise NotSupportedError(
            "torch._C._cuda_getCurrentRawStream", "There is no cudaStream_t. Use torch.cuda.Stream."
        )
    return 0


@supplies("_cuda_getStreamFromExternal")
def get_stream_from_external(scope: Scope, pointer: int, device: int) -> tuple[int, int, int]:
    """The default stream for a null pointer; no other stream has one."""
    if pointer:
        raise NotSupportedError(
            "torch.cuda.ExternalStream", "There is no CUDA stream at that address. Use torch.cuda.Stream."
        )
    return get_default_stream(scope, device)


def _check(scope: Scope, device: int) -> None:
    if not scope.accepts(device):  # c10/cuda/CUDAStream.cpp
        raise RuntimeError(f"Device index value {device} is out of index range [0, {scope.device_count})")


@supplies("_cuda_setStream")
def set_stream(scope: Scope, stream_id: int, device_index: int, device_type: int) -> None:
    """Make a stream current on its device, and the device current, as CUDA does."""
    scope.thread.streams[device_index] = stream_id
    scope.thread.device_index = device_index


@supplies("_cuda_isCurrentStreamCapturing")
def is_current_stream_capturing(scope: Scope) -> bool:
    """Whether this thread is capturing a graph."""
    return scope.thread.capture is not None
