"""Values that each thread has of its own, and blocks that set attributes temporarily."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from torchdevice.kernel.python.interrupt_safe_exit import block


class PerThread(threading.local):
    """Values that each thread has for itself.

    Args:
        **values: The values with which each thread begins; nothing mutable, which threads would
            share.
    """

    def __init__(self, **values: Any) -> None:
        # Called again in each thread that uses the object, with the same arguments.
        vars(self).update(values)


@block
def having(owner: Any, **values: Any) -> Iterator[None]:
    """Let attributes of an object or a module have other values. Blocks nest."""
    before = {name: getattr(owner, name) for name in values}
    try:
        vars(owner).update(values)
        yield
    finally:
        vars(owner).update(before)
