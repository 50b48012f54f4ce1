"""Ranges and the CUDA runtime module. For ``torch/cuda/nvtx.py``, ``profiler.py`` and ``cudart()``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchdevice import _active
from torchdevice.bindings.memory import mem_get_info
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope


class CudaError(enum.IntEnum):
    """The result codes of the CUDA runtime that ``torch.cuda`` compares with."""

    success = 0


class Nvtx:
    """NVTX: markers for a profiler that is not there. Depths and identifiers are kept, as NVTX returns them."""

    def __init__(self) -> None:
        self._depth = 0
        self._ranges = 0

    def rangePushA(self, message: str) -> int:
        """Open a range; return its depth, from 0."""
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        """Close the innermost range; return its depth, negative if there is none."""
        self._depth = max(self._depth - 1, -1)
        return self._depth if self._depth >= 0 else -2

    def rangeStartA(self, message: str) -> int:
        """Open a range that need not nest; return its identifier."""
        self._ranges += 1
        return self._ranges

    def rangeEnd(self, range_id: int) -> None:
        """Close a range by identifier."""

    def markA(self, message: str) -> None:
        """Mark a point."""


class Cudart:
    """The CUDA runtime module, as ``torch.cuda.cudart()`` returns it.

    Stays in ``torch.cuda`` for all threads, so it answers by the scope of the thread that asks and is the build's own
    module (None in a build without CUDA) for the others.
    """

    cudaError = CudaError

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        scope = _active.current()
        if scope is None:
            return getattr(self._original, name)
        if name not in _CUDART:
            raise NotSupportedError(f"torch.cuda.cudart().{name}", "There is no CUDA runtime behind a stand-in device.")
        return scope.bound(_CUDART[name])

    def __bool__(self) -> bool:
        return _active.current() is not None or self._original is not None


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
