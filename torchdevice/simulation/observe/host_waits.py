"""Tells the observers of streams how long kernels took, and where the host waits: ``item()``, blocking copies ..."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.core.context import Context
from torchdevice.simulation.kernels.cpu_kernels import index_of
from torchdevice.simulation.observe.happens_before import host_waits, touched


class HostWaits:
    """Looks at the kernels of one context.

    Args:
        context: The context.
    """

    def __init__(self, context: Context):
        self._context = context

    def run(self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel. If the host waits for its result, it waits for the current streams of the kernel's devices."""
        began = time.perf_counter()
        result = kernel(*args, **kwargs)
        took = time.perf_counter() - began
        with torch._C.DisableTorchFunction():
            waits = host_waits(self._context, op, args, kwargs, result)
            for index in {index_of(tensor) for tensor, _ in touched(op, args, kwargs, result)}:
                stream = index, self._context.thread.streams.get(index, 0)
                for observer in self._context.stream_observers:
                    observer.kernel_ran(stream, took)
                    if waits:
                        observer.stream_synchronized(stream)
        return result


def begin(context: Context) -> None:
    """Look at the kernels of a context from now on. May be called again."""
    if not any(isinstance(each, HostWaits) for each in context.policy.recorders):
        context.policy.recorders.append(HostWaits(context))
        context.policy.settle()
