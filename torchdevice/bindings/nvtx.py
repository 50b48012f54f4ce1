"""Ranges and the CUDA runtime module. For ``torch/cuda/nvtx.py``, ``profiler.py`` and ``cudart()``."""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchdevice import _active
from torchdevice._private import require
from torchdevice.bindings.memory import mem_get_info
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope


_profiler_enabled = require(torch._C._autograd, "_profiler_enabled")


class CudaError(enum.IntEnum):
    """The result codes of the CUDA runtime that ``torch.cuda`` compares with."""

    success = 0


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


class Cudart:
    """The CUDA runtime module, as ``torch.cuda.cudart()`` returns it.

    Stays in ``torch.cuda`` for all threads, so it answers by the scope of the thread that asks and is the build's own
    module (None in a build without CUDA) for the others.
    """

    cudaError = CudaError

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        scope = _active.state.for_cuda
        if scope is None:
            return getattr(self._original, name)
        if name not in _CUDART:
            raise NotSupportedError(f"torch.cuda.cudart().{name}", "There is no CUDA runtime behind a stand-in device.")
        return scope.bound(_CUDART[name])

    def __bool__(self) -> bool:
        return _active.state.for_cuda is not None or self._original is not None


def _get_error_string(scope: Scope, error: int) -> str:
    return "no error" if error == 0 else f"error {int(error)}"


def _success(scope: Scope, *args: Any) -> CudaError:
    return CudaError.success


_CUDART: dict[str, Callable[..., Any]] = {
    "cudaGetErrorString": _get_error_string,
    "cudaMemGetInfo": mem_get_info,
    "cudaProfilerStart": _success,
    "cudaProfilerStop": _success,
    "cudaHostRegister": _success,
    "cudaHostUnregister": _success,
}
