"""A loader whose batches are moved to a device ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from torchdevice.kernel.options import is_number
from torchdevice.transfer.batch_moves import (
    leaves,
    mapped,
    may_copy_alone,
    memory_of,
    moved_by_itself,
)
from torchdevice.transfer.specification import current_stream, have_streams, own_specification


class _Flight(NamedTuple):
    """A batch on its way.

    Attributes:
        batch: The batch on the device, complete after ``arrived``.
        arrived: Where the copies are done; None where they are when they return.
    """

    batch: Any
    arrived: Any


class Prefetcher:
    """A loader that moves batches to a device ahead of their use, on a stream of its own.

    The copies run while the program computes, where the loader's batches are pinned
    (``DataLoader(..., pin_memory=True)``) and the device has streams. Elsewhere batches are moved
    ahead all the same. An error of the loader is raised when the batches before it were handed out.
    A loader may fill the same memory again and again: it is asked for a batch after the one before
    was copied.

    Args:
        loader: An iterable of batches, each as :class:`ToDevice` takes it. Tensors may be anywhere.
        device: Where the batches go. A :class:`DeviceSpec` may name the stream of the copies
            (``transfer_stream``) and the one on which the batches are used (``compute_stream``).
        depth: How many batches are on the device at once: the one in use and those on their way.

    Attributes:
        loader: The loader.
        spec: The device, with its streams.
        depth: As above.

    Raises:
        ValueError: ``depth`` is not an int of 1 or more.
    """

    def __init__(self, loader: Iterable[Any], device: Any, depth: int = 2):
        if not is_number(depth, least=1):
            raise ValueError(
                f"depth={depth!r} is not a number of batches. Use an int of 1 or more."
            )
        self.loader = loader
        self.spec = own_specification(device)
        self.depth = depth

    def __len__(self) -> int:
        """Return the length of the loader, which must have one."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        device = self.spec.here
        stream = self._stream(device)
        batches = iter(self.loader)
        flights: deque[_Flight] = deque()
        copied: Any = None
        end: Exception | None = None
        while True:
            while end is None and len(flights) < self.depth:
                if copied is not None:
                    copied.synchronize()
                try:
                    flights.append(_sent(next(batches), device, stream))
                    copied = flights[-1].arrived
                except Exception as error:
                    end = error
            if flights:
                yield self._received(flights.popleft(), device)
            elif isinstance(end, StopIteration):
                return
            elif end is not None:
                try:
                    raise end
                finally:
                    del end  # or its traceback would hold this frame, and this frame the error

    def _stream(self, device: torch.device) -> Any:
        if self.spec._transfer is not None or not have_streams(device):
            return self.spec._transfer
        return torch.get_device_module(device).Stream(device)

    def _received(self, flight: _Flight, device: torch.device) -> Any:
        """Hand a batch to the compute stream, which waits for it and keeps its memory."""
        if flight.arrived is not None:
            stream = self.spec._compute or current_stream(device)
            flight.arrived.wait(stream)
            for _, leaf in leaves(flight.batch):
                for part in memory_of(leaf) if isinstance(leaf, torch.Tensor) else ():
                    part.record_stream(stream)
        return flight.batch

    def __repr__(self) -> str:
        return f"Prefetcher({self.loader!r}, {str(self.spec)!r}, depth={self.depth})"


def _sent(batch: Any, device: torch.device, stream: Any) -> _Flight:
    """Move a batch, on a stream of the device if there is one."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return moved_by_itself(leaf, device)
        # Tensors that cannot be kept until another stream has used them are copied in the current
        # stream.
        if stream is None or not memory_of(leaf):
            return leaf.to(device)
        with torch.get_device_module(device).stream(stream):
            return leaf.to(device, non_blocking=may_copy_alone(leaf, device))

    return _Flight(mapped(batch, move), None if stream is None else stream.record_event())
