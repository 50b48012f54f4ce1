"""Ranges and markers. For ``torch/cuda/nvtx.py``."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
import torch.cuda.comm
import torch.cuda.green_contexts

from torchdevice import thread_state
from torchdevice.fidelity import Fidelity
from torchdevice.patching import Patch, Replaced
from torchdevice.torch_internals import require

_profiler_enabled = require(torch._C._autograd, "_profiler_enabled")


class Nvtx(threading.local):
    """NVTX: ranges and markers, which ``torch.profiler`` shows as those of ``record_function``.

    Depths and identifiers are as NVTX returns them. Ranges nest per thread.
    """

    def __init__(self) -> None:
        self._open: list[Any] = []
        self._started: dict[int, Any] = {}

    def rangePushA(self, message: str) -> int:
        """Open a range; return its depth, from 0."""
        self._open.append(_shown(message))
        return len(self._open) - 1

    def rangePop(self) -> int:
        """Close the innermost range; return its depth, negative if there is none."""
        if not self._open:
            return -2
        _end(self._open.pop())
        return len(self._open)

    def rangeStartA(self, message: str) -> int:
        """Open a range that need not nest; return its identifier."""
        number = next(_range_ids)
        self._started[number] = _shown(message)
        return number

    def rangeEnd(self, range_id: int) -> None:
        """Close a range by identifier; one of another thread is closed for NVTX only, which shows nothing here."""
        _end(self._started.pop(range_id, None))

    def markA(self, message: str) -> None:
        """Mark a point."""
        _end(_shown(message))


_range_ids = itertools.count(1)


def _shown(message: str) -> Any:
    """Begin what the profiler shows, if one is running."""
    if not _profiler_enabled():
        return None
    shown = torch.profiler.record_function(message)
    shown.__enter__()
    return shown


def _end(shown: Any) -> None:
    if shown is not None:
        shown.__exit__(None, None, None)


class _NvtxByScope:
    """``torch.cuda.nvtx._nvtx``: ours for threads with a scope, torch's own for the others."""

    def __init__(self, original: Any):
        self._original = original
        self._ours = Nvtx()

    def __getattr__(self, name: str) -> Any:
        context = thread_state.state.for_cuda
        if context is None:
            return getattr(self._original, name)
        context.report(f"nvtx.{name}", "what torch.profiler shows as record_function", Fidelity.INERT)
        return getattr(self._ours, name)


def patches() -> list[Patch]:
    """Return the patch of ``torch.cuda.nvtx``."""
    return [Replaced(torch.cuda.nvtx, "_nvtx", _NvtxByScope)]
