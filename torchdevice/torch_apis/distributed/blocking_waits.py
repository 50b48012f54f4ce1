"""Waits that can be polled: gloo closes all connections where a wait for one tensor is given up.

A wait is made in a thread. Threads are used again, because a new one takes longer than most tensors are on their way.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

from torchdevice.core import thread_state
from torchdevice.foundation import forks

_Inbox = queue.SimpleQueue[tuple[Callable[[], Any], "futures.Future[Any]"]]

_idle: list[_Inbox] = []
"""The inboxes of threads that have nothing to wait for."""

_unended: set[futures.Future[Any]] = set()
"""The results of the calls that have not ended."""

# The threads do not exist in a forked child.
forks.in_child(_idle.clear)
forks.in_child(_unended.clear)


def begin(call: Callable[[], Any]) -> futures.Future[Any]:
    """Make a call that waits in another thread. It uses nothing of a scope."""
    result: futures.Future[Any] = futures.Future()
    _unended.add(result)
    result.add_done_callback(_unended.discard)
    _inbox().put((call, result))
    return result


def ended(result: futures.Future[Any], patience: datetime.timedelta) -> bool:
    """Return whether a call ends within a time. Errors of the call are raised here."""
    try:
        result.result(patience.total_seconds())
    except futures.TimeoutError:
        return False
    return True


def until_all_are_over(seconds: float) -> None:
    """Wait until all calls have ended, but no longer than so many seconds."""
    futures.wait([*_unended], seconds)


def _inbox() -> _Inbox:
    """Return the inbox of an idle thread, or of a new one."""
    try:
        # `pop` in one step, since several threads take inboxes.
        return _idle.pop()
    except IndexError:
        inbox: _Inbox = queue.SimpleQueue()
    with thread_state.suspended():  # a thread keeps the scope that it is started in
        # Daemon: a wait that never ends must not keep the process.
        threading.Thread(target=_serve, args=(inbox,), daemon=True).start()
    return inbox


def _serve(inbox: _Inbox) -> None:
    while True:
        call, result = inbox.get()
        try:
            value = call()
        # The caller gets the error where it asks.
        except Exception as error:
            result.set_exception(error)
        else:
            result.set_result(value)
        del call, result  # a thread that waits for its next call holds nothing of the last
        _idle.append(inbox)
