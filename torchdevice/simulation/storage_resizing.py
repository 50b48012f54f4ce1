"""Resizes storages of the device in place, as FSDP does with parameters it gathers and frees.

Torch asks C++ code of an out-of-tree backend for this, and has no way from there to Python. So the
new address and size are written into torch's storage.

Source: ``c10::StorageImpl`` of c10/core/StorageImpl.h.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchdevice.kernel.journal.callers import program_line, site_of
from torchdevice.kernel.lowlevel.dlpack_alias import on_device
from torchdevice.kernel.lowlevel.object_fields import copy, offset_of, word_at
from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.policy import DEVICE_TYPE

_WORDS = 9
"""The words of a storage that are searched: reference counts, address, deleter, device, size,
flags.
"""

_resize_cpu = torch._C.StorageBase.resize_  # type: ignore[attr-defined]
_resizable = torch._C.StorageBase.resizable  # type: ignore[attr-defined]
_device = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]


def resize(storage: Any, size: int) -> Any:
    """Resize a storage of the device, in bytes. Its contents stay, as far as they fit.

    Args:
        storage: The storage. Every tensor that has it sees the change.
        size: The new size in bytes.

    Returns:
        The storage.

    Raises:
        torch.OutOfMemoryError: The new memory would exceed the active scope's memory limit.
        TorchVersionError: Torch's storages are laid out in an unknown way.
    """
    before = storage.nbytes()
    if size == before:
        return storage
    storages.shrunk.pop(storage._cdata, None)
    if size < before:
        storages.shrunk[storage._cdata] = site_of(program_line())
    address_at, size_at = _layout()
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        has_values = not storages.has_no_values(storage)
        memory = torch.empty(size, dtype=torch.uint8, device="cpu" if has_values else "meta")
        if has_values:
            copy(data_ptr(memory), storage.data_ptr(), min(size, before))
        old, address = storages.take_memory(storage, _device(storage).index, memory)
        word_at(storage._cdata + address_at).value = address
        word_at(storage._cdata + size_at).value = size
        if old is not None:
            # torch's storage holds the old memory for its deleter, until no storage shares it.
            freed = old.untyped_storage()
            if _resizable(freed) and freed.nbytes() == before:
                _resize_cpu(freed, 0)
    return storage


@functools.cache
def _layout() -> tuple[int, int]:
    """Return the offsets of the address and of the size in a storage, in bytes."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        tensors = [
            on_device(torch.empty(size, dtype=torch.uint8, device="cpu"), 0)
            for size in (1237, 2221)
        ]
    storages = [tensor.untyped_storage() for tensor in tensors]
    objects = [each._cdata for each in storages]
    return (
        offset_of(
            "c10::StorageImpl::data_ptr_",
            objects,
            [storage.data_ptr() for storage in storages],
            _WORDS,
        ),
        offset_of(
            "c10::StorageImpl::size_bytes_", objects, [each.nbytes() for each in storages], _WORDS
        ),
    )


def register() -> None:
    """Make ``UntypedStorage.resize_`` and ``resizable`` know the device for good."""

    @functools.wraps(_resize_cpu)
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        return resize(self, size) if _device(self).type == DEVICE_TYPE else _resize_cpu(self, size)

    @functools.wraps(_resizable)
    def resizable(self: torch.UntypedStorage) -> bool:
        return _device(self).type == DEVICE_TYPE or _resizable(self)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resizable = resizable  # type: ignore[method-assign, assignment]
