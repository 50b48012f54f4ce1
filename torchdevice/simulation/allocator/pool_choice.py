"""Chooses the pool of free blocks for a request: its stream's and size's, or a private one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torchdevice.simulation.allocator.allocator_stats import Figures
from torchdevice.simulation.allocator.memory_blocks import NOBODY, SHIFT, Owner, Pool


class Pools:
    """The pools of a device.

    Args:
        figures: The statistics of the small pools, under True, and of the large ones, under False.

    Attributes:
        routes: For each private pool that allocations go to: its id, and whether it takes those of
            this thread.
    """

    def __init__(self, figures: Mapping[bool, Figures]):
        self.routes: list[tuple[Owner, Callable[[], bool]]] = []
        self._figures = figures
        self._uses: dict[Owner, int] = {}
        self._pools: dict[tuple[int, bool, Owner, bool], Pool] = {}
        # By `is_small`: False is 0, True is 1. A shorter way for requests that no route takes.
        self._usual: tuple[dict[int, Pool], dict[int, Pool]] = ({}, {})

    def serving(self, stream: int, is_small: bool) -> Pool:
        """Return the pool that serves a request of this thread."""
        # The first route wins, as CUDA asks its filters in order.
        for owner, takes in self.routes:
            if takes():
                return self.pool(stream, is_small, owner)
        found = self._usual[is_small].get(stream)
        if found is None:
            found = self._usual[is_small][stream] = self.pool(stream, is_small, NOBODY)
        return found

    def pool(self, stream: int, is_small: bool, owner: Owner, *, expands: bool = False) -> Pool:
        """Return a pool, which is made if there is none."""
        key = (stream, is_small, owner, expands)
        found = self._pools.get(key)
        if found is None:  # `setdefault` decides between threads
            found = self._pools.setdefault(key, Pool(*key, self._figures[is_small]))
        return found

    def unused(self) -> list[Pool]:
        """Return pools outside private ones in use: the driver may get their segments back."""
        # A copy, since another thread may add a pool.
        return [pool for pool in list(self._pools.values()) if not self.uses_of(pool.owner)]

    def free_in_private(self) -> int:
        """Return the bytes of the free blocks of private pools."""
        # The size is in the upper bits of a key.
        return sum(
            key >> SHIFT
            for pool in self._pools.values()
            if pool.owner != NOBODY
            for key in pool.keys
        )

    def clear(self) -> None:
        """Forget all blocks."""
        for pool in self._pools.values():
            pool.clear()

    # ---- private pools ---------------------------------------------------------------------------

    def keep(self, owner: Owner) -> None:
        """Count one more use of a private pool, which is made if there is none of this id."""
        self._uses[owner] = self.uses_of(owner) + 1

    def release(self, owner: Owner) -> None:
        """Count one use of a private pool less."""
        if owner in self._uses:
            self._uses[owner] -= 1

    def uses_of(self, owner: Owner) -> int:
        """Return how often a private pool is in use."""
        return self._uses.get(owner, 0)

    def unroute(self, owner: Owner) -> None:
        """End the first route of a private pool."""
        found = next((each for each in self.routes if each[0] == owner), None)
        if found is not None:
            self.routes.remove(found)
