"""torchrun's launcher, which ends the other ranks when one has failed."""

from __future__ import annotations

import time
from typing import Any

from torchdevice.core.bindings import replaces
from torchdevice.core.context import Context

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
