"""The objects that a forked child process makes anew."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


def at_fork(**functions: Callable[[], Any]) -> None:
    """Call functions at each fork from now on, if the system forks (``os.register_at_fork``)."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(**functions)


def in_child(function: Callable[[], Any]) -> None:
    """Call a function in every child process forked from now on, if the system can fork."""
    at_fork(after_in_child=function)


def lock(namespace: dict[str, Any]) -> Any:
    """Return a new lock for ``namespace["_lock"]``, which gets another one in a forked child.

    A thread of the parent that held the lock at the fork does not exist in the child, and would
    never release it.
    """
    in_child(lambda: namespace.update(_lock=threading.RLock()))
    return threading.RLock()
