"""The host memory that the program pinned, on a target that needs no page-locked memory."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torchdevice.kernel.devices.sparse_parts import plain_parts
from torchdevice.kernel.torch_internals import data_ptr


class PinnedMemory:
    """The memory that the program pinned, which is noted and not pinned.

    Attributes:
        registered: The memory that the program registered with the CUDA runtime: address -> size.
    """

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self._tensors: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._storages: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember that the program pinned a tensor, and return the tensor."""
        self._tensors[tensor] = True
        # A view is another object with the same storage, so both are kept: the tensor for
        # subclasses without a storage.
        for part in plain_parts(tensor):
            self._storages[part.untyped_storage()] = True
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the program pinned this tensor, or a tensor that this is a view of."""
        # The usual case, without a lookup by a tensor's identity.
        if not (self._tensors.data or self._storages.data or self.registered):
            return False
        if tensor in self._tensors:
            return True
        parts = plain_parts(tensor)  # torch too asks the values of a sparse tensor, which come last
        if not parts or parts[-1].untyped_storage() in self._storages:
            return bool(parts)
        address = data_ptr(parts[-1]) if self.registered and parts[-1].is_cpu else -1
        return any(start <= address < start + size for start, size in self.registered.items())
