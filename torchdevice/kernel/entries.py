"""How the threads of a program are in a scope's context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Entries:
    """The entries of a context.

    Args:
        join: Returns the context manager of a thread that joins the context; the bool sends that
            thread to the CPU.

    Attributes:
        active: The active entries, in all threads.
        features: The features that the scope's options want, see ``kernel/feature.py``.
        way: How the user entered the scope, see :func:`torchdevice.kernel.options.spelled`.
    """

    def __init__(self, join: Callable[[bool], AbstractContextManager[Any]]):
        self.active: set[object] = set()
        self.features: tuple[Any, ...] = ()
        self.way = ""
        self.join = join
