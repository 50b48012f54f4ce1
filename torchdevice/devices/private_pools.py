"""Private pools of a device's allocator, as ``torch.cuda.MemPool`` and graphs use them: what a runtime provides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any, Protocol

PoolId = tuple[int, int]
"""The id of a private pool: (0, n) for one of the program's own, (n, 0) for one that a graph made."""

_ids = itertools.count(1)


def new_id(*, for_graph: bool = False) -> PoolId:
    """Return an id that no pool of this process has."""
    number = next(_ids)
    return (number, 0) if for_graph else (0, number)


class PrivatePools(Protocol):
    """The private pools of one device."""

    def keep_private(self, owner: PoolId) -> None:
        """Count one more use of a pool, which is made if there is none of this id."""

    def release_private(self, owner: PoolId) -> None:
        """Count one use of a pool less. Its segments may be returned to the driver after the last."""

    def uses_of(self, owner: PoolId) -> int:
        """Return how often a pool is in use."""

    def empty_private(self, owner: PoolId) -> None:
        """Return the segments without a block in use to the driver, if the pool is not in use."""

    def route(self, owner: PoolId, takes: Callable[[], bool]) -> None:
        """Let a pool serve the allocations of a thread where ``takes()`` is true."""

    def unroute(self, owner: PoolId) -> None:
        """End the first route of a pool."""


class RawMemory(Protocol):
    """The blocks of one device by the addresses of their values."""

    def allocate(self, size: int, stream: int) -> int:
        """Return the address of new memory of ``size`` bytes, which nothing frees but :meth:`delete`."""

    def delete(self, address: int) -> bool:
        """Free memory that no tensor has. Return whether there was such memory at the address."""

    def storage_at(self, original: Callable[..., Any], address: int, size: int) -> Any:
        """Return a storage of ``size`` bytes with the memory at an address. ``original`` is torch's own function."""

    def checkpoint(self, owner: PoolId) -> object:
        """Return which blocks of a private pool are in use.

        Raises:
            RuntimeError: The pool does not exist, or has ended. The text is torch's.
        """

    def restore(self, checkpoint: Any, stale: Collection[int], adopting: Collection[int]) -> None:
        """Let the blocks of a private pool be in use that were so at a checkpoint, and no others.

        Args:
            checkpoint: The checkpoint.
            stale: The ``_cdata`` of storages whose memory is no longer theirs.
            adopting: The ``_cdata`` of storages that get the restored block at their address.

        Raises:
            RuntimeError: A storage that is not stale would lose its memory. The text is torch's.
        """

    def live(self, owner: PoolId) -> set[int]:
        """Return the addresses of the blocks of a private pool that are in use.

        Raises:
            RuntimeError: The pool does not exist, or has ended. The text is torch's.
        """
