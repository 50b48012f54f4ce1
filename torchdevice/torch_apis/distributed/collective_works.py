"""Work that has finished when a collective returns, and the observers of a program's waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.core import thread_state


def finished(result: Any) -> Any:
    """Return finished work with that result."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    # Torch's own class where nobody records the order of streams: it costs no calls of Python.
    return _Finished(future) if observers() else torch._C._distributed_c10d._create_work_from_future(future)


class _Finished(dist.distributed_c10d.Work):
    """Finished work. The program's streams are ordered after it once the program has waited for it."""

    def __init__(self, future: Any):
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream of each device wait for the collectives so far."""
        collectives_waited()
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Any:
        """Return the tensors."""
        return self._future.value()

    def get_future(self) -> Any:
        """Return the future of the result. torch's C++ waits for it in the place of :meth:`wait`."""
        collectives_waited()
        return self._future


def observers() -> Sequence[Any]:
    """Return the observers of the order of this thread's work."""
    context = thread_state.state.context
    return () if context is None else context.stream_observers


def collectives_waited() -> None:
    """Tell that the program has waited for the collectives so far."""
    for observer in observers():
        observer.collectives_waited()
