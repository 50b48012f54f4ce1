"""Private pools of a device's allocator, as ``torch.cuda.MemPool`` and graphs use them: what a runtime provides."""

from __future__ import annotations

import itertools
from typing import Any

PoolId = tuple[int, int]
"""The id of a private pool: (0, n) for one of the program's own, (n, 0) for one that a graph made."""

_ids = itertools.count(1)


def new_id(*, for_graph: bool = False) -> PoolId:
    """Return an id that no pool of this process has."""
    number = next(_ids)
    return (number, 0) if for_graph else (0, number)


PrivatePools = Any
"""The private pools of one device, which ``simulation/allocator/caching_allocator.py`` has: ``keep_private``,
``release_private``, ``uses_of``, ``empty_private``, ``route`` and ``unroute``.
"""
