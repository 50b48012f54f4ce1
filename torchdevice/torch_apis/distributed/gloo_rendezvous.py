"""How the processes of a gloo group find each other when they begin, and let gloo finish when they end."""

from __future__ import annotations

import atexit
import functools
import time
import uuid
from typing import Any

import torch.distributed as dist

from torchdevice.core.bindings import replaces
from torchdevice.core.context import Context
from torchdevice.torch_apis.distributed import blocking_waits


@functools.cache  # once in a process
def wait_at_end() -> None:
    """Let the process wait at its end until the threads of gloo have dropped the last collectives.

    With a collective a thread drops objects of Python that it holds. If Python has ended by then, that thread ends the
    process with "terminate called without an active exception". So does one that waits for a rank that ends meanwhile.
    """
    atexit.register(time.sleep, _TO_DROP)
    atexit.register(blocking_waits.until_all_are_over, _TO_END)  # comes first


_TO_DROP = 0.1
"""Seconds in which a thread of gloo takes Python's lock once."""

_TO_END = 1.0
"""Seconds in which a rank that ends closes its connections."""


def store_of_this_attempt(store: Any, rank: int, size: int) -> Any:
    """Return a part of a store in which processes that were killed have left nothing.

    The agents of torchrun keep their store when they start the ranks again. gloo would find the addresses of killed
    ranks there. So each rank writes a new value, and waits until all others have seen it. Then all have the new value
    of rank 0.
    """
    others, mine = [each for each in range(size) if each != rank], uuid.uuid4().hex
    unaware = others
    store.set(f"{rank} begins", mine)
    while True:
        for other in others:
            store.set(f"{rank} has seen {other}", store.get(f"{other} begins"))
        if not unaware:  # so all others had begun when their values were read
            return dist.PrefixStore(store.get("0 begins").decode(), store)
        time.sleep(_PAUSE)
        unaware = [other for other in unaware if store.get(f"{other} has seen {rank}").decode() != mine]


_PAUSE = 0.01
"""Seconds between two readings of the other ranks' entries."""


# ---- torchrun's launcher, which ends the other ranks when one has failed ---------------------------------------------

_PATIENCE = 5.0
"""Seconds in which a rank of a busy machine gets an error from a collective, and prints its traceback."""


@replaces("torch.distributed.elastic.multiprocessing.api:SubprocessContext", "_close", native_to="cuda")
def _close(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``SubprocessContext._close``: the ranks that wait for the one that failed first say so, and end by themselves."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        codes = [each.proc.poll() for each in self.subprocess_handlers.values()]
        if None not in codes or not any(codes):
            break
        time.sleep(0.05)
    original(self, *args, **kwargs)
