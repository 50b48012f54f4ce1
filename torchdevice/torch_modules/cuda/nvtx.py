"""NVTX ranges and markers, for ``torch/cuda/nvtx.py``."""

from __future__ import annotations

import itertools
import re
import threading
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.python.per_thread import readable_early

_profiler_enabled = torch._C._autograd._profiler_enabled


@readable_early
class Nvtx(threading.local):
    """Stands in for NVTX: ``torch.profiler`` shows its ranges as ``record_function`` ranges.

    Depths and identifiers are numbered as NVTX numbers them. Ranges nest per thread.
    """

    def __init__(self) -> None:
        self._open: list[Any] = []
        self._started: dict[int, Any] = {}

    def rangePushA(self, message: str) -> int:
        """Open a range and return its depth, from 0."""
        self._open.append(_shown(message))
        return len(self._open) - 1

    def rangePop(self) -> int:
        """Close the innermost range and return its depth; return -2 if no range is open."""
        if not self._open:
            return -2
        _end(self._open.pop())
        return len(self._open)

    def rangeStartA(self, message: str) -> int:
        """Open a range that need not nest and return its identifier."""
        number = next(_range_ids)
        self._started[number] = _shown(message)
        return number

    def rangeEnd(self, range_id: int) -> None:
        """Close the range with an identifier. A range that another thread opened is ignored."""
        _end(self._started.pop(range_id, None))

    def markA(self, message: str) -> None:
        """Show a marker: a range that ends at once."""
        _end(_shown(message))


_range_ids = itertools.count(1)


def _shown(message: str) -> Any:
    """Enter a ``record_function`` range and return it; return None if no profiler is running."""
    if not _profiler_enabled():
        return None
    profiled = torch.profiler.record_function(message)
    profiled.__enter__()
    return profiled


def _end(profiled: Any) -> None:
    if profiled is not None:
        profiled.__exit__(None, None, None)


@replaces(torch.cuda.nvtx, "_nvtx", makes=True)
class _NvtxByScope:
    """``torch.cuda.nvtx._nvtx``: the stand-in for threads in a scope, torch's object elsewhere."""

    def __init__(self, original: Any):
        self._original = original
        self._ours = Nvtx()

    def __getattr__(self, name: str) -> Any:
        context = thread_state.state.for_cuda
        if context is None:
            return getattr(self._original, name)
        # torch's name for `rangePushA` is `range_push`.
        asked = re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name.removesuffix("A"))
        context.report(
            f"torch.cuda.nvtx.{asked}",
            "what torch.profiler shows as record_function",
            Fidelity.INERT,
        )
        return getattr(self._ours, name)
