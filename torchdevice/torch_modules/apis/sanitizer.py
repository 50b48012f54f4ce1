"""``torch.cuda._sanitizer`` and the events on which it runs, for ``torch/cuda/_gpu_trace.py``.

In a build with CUDA, ``torch._C._activate_gpu_trace`` lets C++ call the registered functions from
then on. Here the calls come from the scope's streams and events and from the allocator of the
simulated device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.cuda._gpu_trace as gpu_trace

from torchdevice.calls.mode import with_mode
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces, supplied_function
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_memory import Block
from torchdevice.kernel.devices.observer import Observer
from torchdevice.torch_modules.cuda.streams import handle_of


class Trace(Observer):
    """Calls the hooks of ``torch.cuda._gpu_trace`` with the handles of streams and events."""

    def device_synchronized(self, index: int) -> None:
        gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks()

    def allocated(self, block: Block) -> None:
        """Call the functions that are registered for allocations."""
        gpu_trace.MemoryAllocationCallbacks.fire_callbacks(block.address)

    def freed(self, address: int) -> None:
        """Call the functions that are registered for deallocations."""
        gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(address)

    def fire(self, event: str, *told: Any) -> None:
        """Call the functions that are registered for an event, with the handles of streams."""
        handles = (handle_of(each) if isinstance(each, tuple) else each for each in told)
        getattr(gpu_trace, f"{event}Callbacks").fire_callbacks(*handles)


_EVENTS = {
    "stream_created": "StreamCreation",
    "event_created": "EventCreation",
    "event_deleted": "EventDeletion",
    "event_recorded": "EventRecord",
    "event_waited": "EventWait",
    "event_synchronized": "EventSynchronization",
    "stream_synchronized": "StreamSynchronization",
}
"""Method of an observer -> the event in the names of ``torch.cuda._gpu_trace``."""

for _method, _event in _EVENTS.items():
    setattr(Trace, _method, functools.partialmethod(Trace.fire, _event))


class _Activation:
    """Whether the program has asked for the trace, for the life of the process as in C++."""

    asked = False


@supplied_function("_activate_gpu_trace")
def activate_gpu_trace(context: Context) -> None:
    """Call the functions that are registered with ``torch.cuda._gpu_trace`` from now on."""
    if not context.runtime.supplied.has_handles:
        thread_state.refuse(
            "torch._C._activate_gpu_trace",
            "Use a simulated device: simulate() or --target simulated.",
        )
    _Activation.asked = True
    begin(context)


def begin(context: Context) -> None:
    """Let a context fire the trace, if the program has ever asked for it. May be called again."""
    if not _Activation.asked or any(isinstance(each, Trace) for each in context.observers.order):
        return
    context.observers.add(Trace())
    context.runtime.supplied.watch_host_waits(context)


def end(context: Context) -> None:
    """Let a context fire the trace no more. May be called again."""
    context.observers.end(Trace)


# It asks tensors whether they are on CUDA.
replaces("torch.cuda._sanitizer:CUDASanitizerDispatchMode", "__torch_dispatch__", sees_scope=True)(
    with_mode
)


def enable() -> None:
    """Enable torch's sanitizer as a CUDA build's import does with ``TORCH_CUDA_SANITIZER``."""
    import torch.cuda._sanitizer

    torch.cuda._sanitizer.enable_cuda_sanitizer()
