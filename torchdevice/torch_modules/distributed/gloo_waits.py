"""How a process waits for others of a gloo group: at the start, for a tensor, at the end.

gloo closes all connections where a wait for one tensor is given up. So a wait is made in a thread,
and can be polled. Threads are used again, because a new one takes longer than most tensors are on
their way.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import queue
import threading
import time
import uuid
from collections.abc import Callable
from concurrent import futures
from typing import Any

import torch.distributed as dist

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.python import forks

# ---- waits that can be polled --------------------------------------------------------------------

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
        error = result.exception(patience.total_seconds())
    except futures.TimeoutError:
        return False
    if error is None:
        return True
    try:
        raise error  # here, so that no frame of Python's own stands in the traceback
    finally:
        del error  # whose traceback has this frame


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


# ---- when ranks begin and end --------------------------------------------------------------------


@functools.cache  # once in a process
def wait_at_end() -> None:
    """Let the process wait at its end until the threads of gloo have dropped the last collectives.

    With a collective a thread drops objects of Python that it holds. If Python has ended by then,
    that thread ends the process with "terminate called without an active exception". So does one
    that waits for a rank that ends meanwhile.
    """
    atexit.register(time.sleep, _TO_DROP)
    atexit.register(lambda: futures.wait([*_unended], _TO_END))  # comes first


_TO_DROP = 0.1
"""Seconds in which a thread of gloo takes Python's lock once."""

_TO_END = 1.0
"""Seconds in which a rank that ends closes its connections."""


def store_of_this_attempt(store: Any, rank: int, size: int) -> Any:
    """Return a part of a store in which processes that were killed have left nothing.

    The agents of torchrun keep their store when they start the ranks again. gloo would find the
    addresses of killed ranks there. So each rank writes a new value, and waits until all others
    have seen it. Then all have the new value of rank 0.
    """
    others = [each for each in range(size) if each != rank]
    mine = uuid.uuid4().hex
    unaware = others
    store.set(f"{rank} begins", mine)
    while True:
        for other in others:
            store.set(f"{rank} has seen {other}", store.get(f"{other} begins"))
        if not unaware:  # so all others had begun when their values were read
            return dist.PrefixStore(store.get("0 begins").decode(), store)  # type: ignore[attr-defined]
        time.sleep(_PAUSE)
        unaware = [
            other for other in unaware if store.get(f"{other} has seen {rank}").decode() != mine
        ]


def wait_for_all(store: Any, size: int, timeout: datetime.timedelta) -> None:
    """Wait until all ranks of a group have called this.

    gloo connects each pair of ranks by itself. If a rank with all of its connections ended while
    the others still connect, they would get gloo's error about a connection, which does not name
    the rank.

    Args:
        store: A store of the group.
        size: The number of ranks.
        timeout: How long to wait.
    """
    connected = store.add("connected", 1)
    # A program may make several groups of one store, one after the other.
    number = (connected - 1) // size
    if connected % size == 0:
        store.set(f"all connected {number}", "")
    store.wait([f"all connected {number}"], timeout)


_PAUSE = 0.01
"""Seconds between two readings of the other ranks' entries."""


# ---- torchrun's launcher, which ends the other ranks when one has failed -------------------------

_PATIENCE = 5.0
"""Seconds in which a rank of a busy machine gets an error from a collective, and prints its
traceback.
"""


@replaces(
    "torch.distributed.elastic.multiprocessing.api:SubprocessContext", "_close", native_to="cuda"
)
def _close(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``SubprocessContext._close``: let ranks that wait for a failed one report it and end."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        codes = [each.proc.poll() for each in self.subprocess_handlers.values()]
        if None not in codes or not any(codes):
            break
        time.sleep(0.05)
    original(self, *args, **kwargs)
