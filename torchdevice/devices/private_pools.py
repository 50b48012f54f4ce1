"""Private pools of a device's allocator, as ``torch.cuda.MemPool`` and graphs use them: what a runtime provides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

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
