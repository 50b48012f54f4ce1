"""Threads inherit the scope of the code that starts them, and tasks of an executor that of the code that submits them.

A thread of an executor's own is no heir: it outlives the submitting code and serves others.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torchdevice import _active
from torchdevice._patching import Patch, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_RUN = "run"

_NO_HEIRS = ("multiprocessing.queues", "concurrent.futures.process", "tqdm._monitor")
"""Modules whose threads never call torch, and may outlive the code that made them by the rest of the process."""


def _start(scope: Scope, original: Any, self: threading.Thread) -> None:
    """``Thread.start``: let ``run`` enter the scope; the attribute is gone as soon as the thread runs."""
    target = getattr(self, "_target", None) or type(self)
    if getattr(target, "__module__", None) in _NO_HEIRS:
        return original(self)
    run = self.run

    def run_in_scope() -> None:
        self.__dict__.pop(_RUN, None)
        with scope:
            run()

    if _RUN not in self.__dict__:
        self.__dict__[_RUN] = run_in_scope
    try:
        original(self)
    except BaseException:
        self.__dict__.pop(_RUN, None)
        raise


def _submit(scope: Scope, original: Any, self: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``ThreadPoolExecutor.submit``: run the task in the scope, and start workers without it."""

    @functools.wraps(fn)
    def task(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return fn(*args, **kwargs)

    with _active.suspended():
        return original(self, task, *args, **kwargs)


def patches() -> list[Patch]:
    """Return the patches of threads and thread pools."""
    return [
        replaced_function(threading.Thread, "start", _start),
        replaced_function(ThreadPoolExecutor, "submit", _submit),
    ]
