"""Threads inherit the scope of the code that starts them. Tasks of an executor inherit that of the submitting code.

The worker threads of an executor inherit no scope, because they outlive the submitting code and run tasks of others.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.patching import Patch, replaced_function

_RUN = "run"


_INHERIT_NO_SCOPE = ("multiprocessing.queues", "concurrent.futures.process", "tqdm._monitor")
"""Modules whose threads inherit no scope: they never call torch, and may run until the process ends."""


def _start(context: Context, original: Any, self: threading.Thread) -> None:
    """``Thread.start``: run the thread in the scope. It sets ``run`` on the thread until the thread runs."""
    target = getattr(self, "_target", None) or type(self)
    if getattr(target, "__module__", None) in _INHERIT_NO_SCOPE:
        return original(self)
    run, inherited = self.run, context.in_another_thread()

    def run_in_scope() -> None:
        self.__dict__.pop(_RUN, None)
        with inherited:
            run()

    if _RUN not in self.__dict__:
        self.__dict__[_RUN] = run_in_scope
    try:
        original(self)
    except BaseException:
        self.__dict__.pop(_RUN, None)
        raise


def _submit(context: Context, original: Any, self: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``ThreadPoolExecutor.submit``: run the task in the scope, and start worker threads outside it."""

    inherited = context.in_another_thread()
    _initialize_in_scope(self, inherited)

    @functools.wraps(fn)
    def task(*args: Any, **kwargs: Any) -> Any:
        with inherited:
            return fn(*args, **kwargs)

    with thread_state.suspended():
        return original(self, task, *args, **kwargs)


def _initialize_in_scope(pool: ThreadPoolExecutor, inherited: AbstractContextManager[Any]) -> None:
    """Run the initializer of a pool's workers in the scope, also in a pool that was made before the scope."""
    attribute = "_create_worker_context" if hasattr(pool, "_create_worker_context") else "_initializer"
    present = getattr(pool, attribute)
    if present is None or isinstance(present, _Initializer):
        return
    setattr(pool, attribute, _Initializer(present, inherited, makes_workers=attribute != "_initializer"))


class _Initializer:
    """Runs the initializer of a pool's workers in a scope.

    Args:
        original: The initializer; from Python 3.14 on, the function that makes a worker's context, which holds it.
        inherited: The context manager that puts a worker in the scope.
        makes_workers: Whether ``original`` makes a worker's context.
    """

    def __init__(self, original: Any, inherited: AbstractContextManager[Any], *, makes_workers: bool):
        self._original, self._inherited, self._makes_workers = original, inherited, makes_workers

    def __call__(self, *args: Any) -> Any:
        if self._makes_workers:
            worker = self._original(*args)
            worker.initialize = functools.partial(self._run, worker.initialize)
            return worker
        return self._run(self._original, *args)

    def _run(self, initializer: Any, *args: Any) -> Any:
        with self._inherited:
            return initializer(*args)


def patches() -> list[Patch]:
    """Return the patches of threads and thread pools."""
    return [
        replaced_function(threading.Thread, "start", _start),
        replaced_function(ThreadPoolExecutor, "submit", _submit),
    ]
