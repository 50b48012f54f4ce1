"""The work that a collective returns, and the observers of a program's waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.core import thread_state


def finished(result: Any) -> Any:
    """Return finished work with that result."""
    # Torch's own class where nobody records the order of streams: it costs no calls of Python.
    return Work(result) if observers() else torch._C._distributed_c10d._create_work_from_future(done(result))


def done(result: Any) -> torch.futures.Future[Any]:
    """Return a future that has that result."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


class Work(dist.distributed_c10d.Work):
    """Work with a result, after parts that may go on. The program's streams are ordered after it once it has waited.

    Args:
        result: The tensors.
        parts: The work that has to be done before.
    """

    def __init__(self, result: Any, parts: Sequence[Any] = ()):
        super().__init__()
        self._result, self._parts = result, parts

    def wait(self, timeout: Any = None) -> bool:
        """Wait, and let the current stream of each device wait for the collectives so far.

        Raises:
            RuntimeError: The collective has failed, or has not ended within the time-out.
        """
        for part in self._parts:
            part.wait(*([timeout] if timeout else ()))
        collectives_waited()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has ended, also by an error."""
        return all(part.is_completed() for part in self._parts)

    def result(self) -> Any:
        """Return the tensors, which are complete after :meth:`wait`."""
        return self._result

    def get_future(self) -> Any:
        """Wait, and return the future of the result. torch's C++ waits for it in the place of :meth:`wait`."""
        self.wait()
        return done(self._result)


def observers() -> Sequence[Any]:
    """Return the observers of the order of this thread's work."""
    context = thread_state.state.context
    return () if context is None else context.stream_observers


def collectives_waited() -> None:
    """Tell that the program has waited for the collectives so far."""
    for observer in observers():
        observer.collectives_waited()
