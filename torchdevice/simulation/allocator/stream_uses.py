"""``Tensor.record_stream`` on simulated devices: the memory of a tensor that another stream uses is not reused at once.

CUDA's allocator reuses such memory when the other stream has done its work. Here that counts as done when the host next
waits for a device in any way: a synchronisation, an event, a number or a copy that comes to the host.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.devices.stream_order import Stream, StreamObserver
from torchdevice.simulation.allocator import storages


class StreamUses(StreamObserver):
    """Tells the allocator which streams use a tensor's memory, and when the host has waited for the devices."""

    def memory_used(self, tensor: Any, stream: Stream) -> None:
        with torch._C.DisableTorchFunction():
            # Sparse tensors have no storage of their own.
            owner = storages.owner_of(tensor.untyped_storage()) if tensor.layout is torch.strided else None
        if owner is not None and owner.block is not None:
            owner.on.use(owner.block, stream)

    def _wait(self, waited_for: Any) -> None:
        storages.host_waited()

    event_synchronized = stream_synchronized = device_synchronized = _wait  # type: ignore[assignment]
    # A query that says "done" is a wait that took no time.
    event_queried = stream_queried = _wait  # type: ignore[assignment]
