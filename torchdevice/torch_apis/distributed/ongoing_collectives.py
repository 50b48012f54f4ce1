"""Collectives that go on while the program computes, as with ``async_op=True``.

Another thread does them, one after the other, since the ranks of a group do theirs in one order. The program waits for
them by their works, by its next collective of the group that does not go on, and where it waits for the whole device,
as NCCL's own stream is one of the device's.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any

import torch.distributed as dist

from torchdevice.core import thread_state
from torchdevice.devices.stream_order import StreamObserver
from torchdevice.torch_apis.distributed import blocking_waits, collective_checks
from torchdevice.torch_apis.distributed.nccl_group import NcclGroup


class Ongoing(StreamObserver):
    """A collective in another thread.

    Args:
        group: The group of the ranks.
        call: What this rank calls.
        times: How many collectives of the group this rank has begun.
        exchange: Does the collective. It uses nothing of a scope.
    """

    def __init__(self, group: NcclGroup, call: collective_checks.Call, times: int, exchange: Callable[[], object]):
        self._group, self._call, self._times = group, call, times
        self._context = thread_state.state.context
        before = group.ongoing and group.ongoing._result
        self._result = blocking_waits.begin(functools.partial(_in_order, before, exchange))
        group.ongoing = self
        if self._context is not None:
            # Those that have ended go, which hold tensors: the program may wait for none of them.
            known = self._context.stream_observers
            known[:] = [*(each for each in known if not (isinstance(each, Ongoing) and each.is_completed())), self]

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait until it has ended.

        Raises:
            RuntimeError: It has failed.
            DistBackendError: It has not ended within the time-out.
        """
        if timeout is not None and not blocking_waits.ended(self._result, timeout):
            raise dist.DistBackendError(f"Watchdog caught collective operation timeout: {self._call.name}")
        try:
            has_ended = functools.partial(blocking_waits.ended, self._result, collective_checks.PATIENCE)
            self._group.wait_for(has_ended, self._call, self._times)
        finally:
            self._drop()

    def is_completed(self) -> bool:
        """Return whether it has ended, also by an error."""
        return self._result.done()

    def device_synchronized(self, index: int) -> None:
        """The host has waited for a device."""
        self.settle()

    def settle(self) -> None:
        """Wait until it has ended. Its error is for :meth:`wait` to raise, unless it can never end."""
        try:
            self.wait()
        except Exception:
            if not self.is_completed():
                raise

    def _drop(self) -> None:
        if self._group.ongoing is self:
            self._group.ongoing = None
        if self._context is not None:
            known = self._context.stream_observers
            known[:] = [each for each in known if each is not self]


def _in_order(before: futures.Future[Any] | None, exchange: Callable[[], object]) -> None:
    futures.wait([before] if before is not None else [])
    exchange()
