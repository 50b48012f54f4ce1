"""Values that each thread has of its own, and blocks that set attributes temporarily."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeVar

from torchdevice.kernel.python.interrupt_safe_exit import block

T = TypeVar("T", bound=threading.local)


class PerThread(threading.local):
    """Values that each thread has for itself.

    Args:
        **values: The values with which each thread begins; nothing mutable, which threads would
            share.
    """

    def __new__(cls, **values: Any) -> PerThread:
        # As attributes of a class, which a thread that begins needs not set: see `readable_early`.
        return super().__new__(type(cls.__name__, (cls,), values))


def readable_early(cls: type[T]) -> type[T]:
    """Let a thread's values be read while its ``__init__`` runs: as those of a new thread.

    Python calls ``__init__`` where a thread first uses the object. A garbage collection may come in
    its midst, and with it callbacks and finalizers that use the same object.
    """
    for name, value in vars(cls()).items():
        setattr(cls, name, value)
    return cls


@block
def having(owner: Any, **values: Any) -> Iterator[None]:
    """Let attributes of an object or a module have other values. Blocks nest."""
    before = {name: getattr(owner, name) for name in values}
    try:
        vars(owner).update(values)
        yield
    finally:
        vars(owner).update(before)
