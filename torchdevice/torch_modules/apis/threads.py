"""Threads inherit the scope of the code that starts them, tasks of executors the submitter's.

The worker threads of an executor inherit no scope, because they outlive the submitting code and run
tasks of others.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.python.per_thread import having

_INHERIT_NO_SCOPE = (
    "concurrent.futures.process",
    "multiprocessing.queues",
    "multiprocessing.resource_sharer",
    "tqdm._monitor",
)
"""Modules whose threads inherit no scope: they never call torch, and may run until the process
ends.
"""


@replaces(threading.Thread, "start")
def _start(context: Context, original: Any, self: threading.Thread) -> None:
    """``Thread.start``: run the thread in the scope, with a ``run`` set until it runs."""
    target = getattr(self, "_target", None)
    if getattr(type(self) if target is None else target, "__module__", None) in _INHERIT_NO_SCOPE:
        return original(self)
    of_thread = self.__dict__.get("run")  # a program may have set one of its own
    run, inherited = self.run, context.entries.join(context.thread.forced_cpu)

    def restore() -> None:
        self.__dict__.pop("run", None)
        if of_thread is not None:
            self.__dict__["run"] = of_thread

    def run_in_scope() -> None:
        restore()
        # In this function: leaving a scope takes the frame of its caller out of tracebacks.
        with inherited:
            run()

    try:
        self.__dict__["run"] = run_in_scope
        original(self)
    except BaseException:
        restore()
        raise


def _in_scope(context: Context, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that another thread calls, and that then runs in the scope."""
    inherited = context.entries.join(context.thread.forced_cpu)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with inherited:
            return function(*args, **kwargs)

    return run


@replaces(ThreadPoolExecutor, "submit")
def _submit(
    context: Context, original: Any, self: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """``ThreadPoolExecutor.submit``: run the task in the scope."""
    return original(self, _in_scope(context, fn), *args, **kwargs)


@replaces(ThreadPoolExecutor, "_adjust_thread_count")
def _start_worker(context: Context, original: Any, self: ThreadPoolExecutor) -> None:
    """Start an executor's worker outside the scope, but run its initializer in the scope.

    The pool passes the initializer to the worker here, and holds its lock meanwhile.
    """
    by_context = hasattr(self, "_create_worker_context")  # Python 3.14 and later
    attribute = "_create_worker_context" if by_context else "_initializer"
    given = getattr(self, attribute)
    made: Any = given
    if by_context:
        made = functools.partial(_worker_context, context, given)
    elif given is not None:  # it may be falsy, as an empty container that can be called is
        made = _in_scope(context, given)
    with having(self, **{attribute: made}), thread_state.suspended():
        original(self)


def _worker_context(context: Context, make: Callable[[], Any]) -> Any:
    """Return the context of an executor's worker, as Python 3.14 makes it."""
    worker = make()
    worker.initialize = _in_scope(context, worker.initialize)
    return worker
