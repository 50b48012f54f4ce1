"""Moves between devices as objects: where from, where to, on which streams, and back.

They need no scope. They are written on torch's public functions, so a scope changes what they do as
it changes a program's own ``.to(...)``.

May import ``errors`` and ``kernel``.
"""

from torchdevice.transfer.batch_moves import ToDevice
from torchdevice.transfer.prefetcher import Prefetcher
from torchdevice.transfer.specification import DeviceSpec

__all__ = ["DeviceSpec", "Prefetcher", "ToDevice"]
