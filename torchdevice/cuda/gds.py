"""Reading and writing storages of the device from files. For ``torch/cuda/gds.py`` (GPUDirect Storage).

The bytes go through the CPU: nothing here reads a disk into a device. The file descriptor loses ``O_DIRECT``, which
asks for aligned buffers.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.supplied import supplied_function, supplied_value


@supplied_value("torch._C._has_gds")
def has_gds(context: Context) -> bool:
    """True: files can be read into storages."""
    return True


@supplied_function("_gds_register_buffer")
def register_buffer(context: Context, storage: Any) -> None:
    """Nothing to register: any storage can be read into."""


@supplied_function("_gds_deregister_buffer")
def deregister_buffer(context: Context, storage: Any) -> None:
    """Nothing to take back."""


@supplied_function("_gds_register_handle")
def register_handle(context: Context, descriptor: int) -> int:
    """The file descriptor itself."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
    return descriptor


@supplied_function("_gds_deregister_handle")
def deregister_handle(context: Context, handle: int) -> None:
    """Nothing to close: the file closes its descriptor."""


@supplied_function("_gds_load_storage")
def load_storage(context: Context, handle: int, storage: Any, offset: int) -> None:
    """Read a storage's bytes from the file at an offset."""
    data = bytearray()
    while len(data) < storage.nbytes():
        read = os.pread(handle, storage.nbytes() - len(data), offset + len(data))
        if not read:
            raise RuntimeError(f"the file ends after {len(data)} of {storage.nbytes()} bytes at offset {offset}")
        data += read
    if data:
        _bytes_of(storage).copy_(torch.frombuffer(data, dtype=torch.uint8))


@supplied_function("_gds_save_storage")
def save_storage(context: Context, handle: int, storage: Any, offset: int) -> None:
    """Write a storage's bytes to the file at an offset."""
    data = memoryview(_bytes_of(storage).cpu().numpy().tobytes())
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _bytes_of(storage: Any) -> torch.Tensor:
    whole = getattr(storage, "_untyped_storage", storage)
    return torch.empty(0, dtype=torch.uint8, device=whole.device).set_(whole)
