"""Reading and writing storages of the device from files, for ``torch/cuda/gds.py`` (GPUDirect Storage).

The bytes go through the CPU's memory. The file descriptor loses ``O_DIRECT``, which requires aligned buffers.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from torchdevice.core.bindings import supplied_function, supplied_value
from torchdevice.core.context import Context


@supplied_value("torch._C._has_gds")
def has_gds(context: Context) -> bool:
    """Return True: files can be read into storages."""
    return True


@supplied_function(["_gds_register_buffer", "_gds_deregister_buffer"])
def register_buffer(context: Context, storage: Any) -> None:
    """Do nothing: any storage can be read into without registration."""


@supplied_function("_gds_register_handle")
def register_handle(context: Context, descriptor: int) -> int:
    """Clear ``O_DIRECT`` of the file descriptor and return it as the handle."""
    import fcntl  # not on Windows

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
    return descriptor


@supplied_function("_gds_deregister_handle")
def deregister_handle(context: Context, handle: int) -> None:
    """Do nothing: ``GdsFile`` closes the file descriptor itself."""


@supplied_function("_gds_load_storage")
def load_storage(context: Context, handle: int, storage: Any, offset: int) -> None:
    """Fill a storage with bytes of the file from an offset on.

    Raises:
        RuntimeError: The file ends before the storage is full.
    """
    data = bytearray()
    while len(data) < storage.nbytes():
        read = os.pread(handle, storage.nbytes() - len(data), offset + len(data))
        if not read:
            raise RuntimeError(
                f"The file ends {len(data)} bytes after offset={offset!r}, and the storage has {storage.nbytes()} "
                f"bytes. Use a smaller storage or a smaller offset."
            )
        data += read
    if data:
        _bytes_of(storage).copy_(torch.frombuffer(data, dtype=torch.uint8))


@supplied_function("_gds_save_storage")
def save_storage(context: Context, handle: int, storage: Any, offset: int) -> None:
    """Write the bytes of a storage to the file from an offset on."""
    data = memoryview(_bytes_of(storage).cpu().numpy().tobytes())
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _bytes_of(storage: Any) -> torch.Tensor:
    """Return a one-dimensional uint8 tensor that shares the memory of a storage."""
    untyped = getattr(storage, "_untyped_storage", storage)
    return torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)
