"""Streams. For ``torch/cuda/__init__.py`` and ``torch/cuda/streams.py``.

A target runs its work in order, so a stream is a name: each has an id, and each thread a current one per device. The
classes are in ``torchdevice/shims/stream_types.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdevice.bindings import supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope

CUDA_DEVICE_TYPE = 1
"""``c10::DeviceType::CUDA``."""


@supplies("_cuda_getCurrentStream")
def get_current_stream(scope: Scope, device: int) -> tuple[int, int, int]:
    """The id of this thread's current stream on the device, the device, and CUDA's device type."""
    return scope.thread.streams.get(device, 0), device, CUDA_DEVICE_TYPE


@supplies("_cuda_getDefaultStream")
def get_default_stream(scope: Scope, device: int) -> tuple[int, int, int]:
    """Stream 0 of the device."""
    return 0, device, CUDA_DEVICE_TYPE


@supplies("_cuda_setStream")
def set_stream(scope: Scope, stream_id: int, device_index: int, device_type: int) -> None:
    """Make a stream current on its device, and the device current, as CUDA does."""
    scope.thread.streams[device_index] = stream_id
    scope.thread.device_index = device_index


@supplies("_cuda_isCurrentStreamCapturing")
def is_current_stream_capturing(scope: Scope) -> bool:
    """Whether this thread is capturing a graph."""
    return scope.thread.capture is not None
