"""What the active scope forbids: memory beyond a limit, dtypes and operators that the profile's device lacks.

Kernels are registered for the whole process; what they refuse is the scope's. ``watching`` counts the scopes that
refuse anything, so that without one a kernel pays for reading a number.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchdevice import _active
from torchdevice._journal import Fidelity
from torchdevice._runtimes import MEMORY_FRACTION

if TYPE_CHECKING:
    from torchdevice.simulation._runtime import SimulatedRuntime

KIND = "simulated"
"""The device type's name."""

_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"

watching = 0
_lock = threading.Lock()


class _Thread(threading.local):
    lifted = False


_thread = _Thread()


def watch(change: int) -> None:
    """Count a scope that begins (1) or ends (-1) to refuse something."""
    global watching
    with _lock:
        watching += change


@functools.cache
def watch_from_now_on() -> None:
    """Ask for the scope's limits at every allocation for the rest of the process."""
    watch(1)


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Refuse nothing in this thread, for what the package itself does."""
    before, _thread.lifted = _thread.lifted, True
    try:
        yield
    finally:
        _thread.lifted = before


def _runtime() -> SimulatedRuntime | None:
    scope = _active.state.scope
    if scope is None or scope.runtime.kind != KIND or _thread.lifted:
        return None
    return scope.runtime  # type: ignore[return-value]


def check_scope() -> None:
    """Raise unless this thread is in a scope on the device: outside, nothing new is made there."""
    state = _active.state
    away = state.scope is None and not state.compiling
    if away or all(entry.runtime.kind != KIND for entry in state.entered):
        raise RuntimeError(
            f"no scope on a {KIND} device is active in this thread, so nothing can be made on one. Enter "
            f"torchdevice.simulate(), or copy the tensors that are left to the CPU."
        )


def spelled(index: int) -> str:
    """Return how a message names the device: as the program's tensors say they are on it."""
    scope = _active.state.scope
    family = "cuda" if scope is not None and scope.identity == "cuda" else KIND
    return f"{family}:{index}"


def check_dtype(dtype: torch.dtype) -> None:
    """Raise the real device's error if the profile does not hold the dtype."""
    runtime = _runtime()
    if runtime is not None and dtype in runtime.unsupported_dtypes:
        raise TypeError(runtime.profile.dtype_message(dtype))


def check_memory(index: int, wanted: int, allocated: int, reserved: int) -> None:
    """Raise CUDA's out-of-memory error if the scope limits the memory and ``wanted`` more bytes are too many."""
    runtime = _runtime()
    if runtime is None:
        return
    scope = _active.state.scope
    fraction = scope.settings.get((MEMORY_FRACTION, index)) if scope is not None else None
    if runtime.memory_limit is None and fraction is None:
        return
    total = runtime.total_memory(index)
    limit = total if fraction is None else int(total * fraction)
    if allocated + wanted > limit:
        allowed = "" if fraction is None else f"{_size(limit)} allowed; "
        raise torch.OutOfMemoryError(_out_of_memory(index, wanted, allocated, reserved, total, allowed))


def _out_of_memory(index: int, wanted: int, allocated: int, reserved: int, total: int, allowed: str) -> str:
    """Return the text of CUDA's caching allocator, c10/cuda/CUDACachingAllocator.cpp."""
    unused = max(0, min(reserved, total) - allocated)
    in_use = allocated + unused
    return (
        f"CUDA out of memory. Tried to allocate {_size(wanted)}. GPU {index} has a total capacity of {_size(total)} of "
        f"which {_size(total - in_use)} is free. Including non-PyTorch memory, this process has {_size(in_use)} memory "
        f"in use. {allowed}Of the allocated memory {_size(allocated)} is allocated by PyTorch, and {_size(unused)} is "
        f"reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        f"PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        f"Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def _size(size: int) -> str:
    """Return a size as CUDA's allocator writes it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


def provides(op: Any) -> bool:
    """Return whether the active scope's device has an operator."""
    runtime = _runtime()
    return runtime is None or runtime.profile.missing(op) is None


def check_operator(op: Any) -> None:
    """Let an operator pass that the profile's device lacks, or raise the error that device raises.

    It passes, counted, where ``PYTORCH_ENABLE_MPS_FALLBACK`` is set, as on the device, and the scope is not strict.

    Raises:
        NotImplementedError: It does not pass.
    """
    runtime = _runtime()
    if runtime is None:
        return
    missing = runtime.profile.missing(op)
    if missing is None:
        return
    scope = _active.state.scope
    assert scope is not None
    if runtime.profile.refuses or scope.strict or os.environ.get(_FALLBACK, "0") == "0":
        raise NotImplementedError(runtime.profile.missing_message(missing))
    runtime.fallbacks[missing] += 1
    scope.report(missing, "the operator on the CPU", Fidelity.APPROXIMATE)
