"""``Tensor.record_stream`` on simulated devices: the memory of a tensor that another stream uses is not reused at once.

CUDA's allocator reuses such memory when the other stream has done its work. Here that counts as done when the host next
waits for a device in any way: a synchronisation, an event, a number or a copy that comes to the host.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.core.context import Context
from torchdevice.devices.stream_order import Stream, StreamObserver
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.allocator_settings import DEFAULT, Settings


class StreamUses(StreamObserver):
    """Tells the allocator which streams use a tensor's memory, and when the host has waited for the devices."""

    def memory_used(self, tensor: Any, stream: Stream) -> None:
        with torch._C.DisableTorchFunction():
            block = storages.block_of(tensor.untyped_storage()) if tensor.layout is torch.strided else None
        if block is not None:
            storages.device(tensor.get_device()).use(block, stream)

    def event_synchronized(self, event: int) -> None:
        storages.host_waited()

    def stream_synchronized(self, stream: Stream) -> None:
        storages.host_waited()

    def device_synchronized(self, index: int) -> None:
        storages.host_waited()

    event_queried = event_synchronized
    stream_queried = stream_synchronized


_outer: dict[Context, dict[int, Settings]] = {}
"""Active context inside another -> the settings of each device's allocator before it."""


def begin(context: Context, *, is_nested: bool) -> None:
    """Let a context defer the reuse of memory. May be called again.

    A context begins with the default settings and without cached segments, one inside another with those of the other.
    """
    if any(isinstance(each, StreamUses) for each in context.stream_observers):
        return
    context.stream_observers.append(StreamUses())
    if is_nested:
        _outer[context] = {device.index: device.settings for device in storages.devices()}
    for device in storages.devices():
        if not is_nested:
            device.configure(DEFAULT)
            device.empty_cache()


def end(context: Context) -> None:
    """Defer nothing any more, and put the settings of the context around this one back. May be called again."""
    context.stream_observers[:] = [each for each in context.stream_observers if not isinstance(each, StreamUses)]
    before = _outer.pop(context, None)
    if before is not None:
        for device in storages.devices():
            device.configure(before.get(device.index, DEFAULT))
