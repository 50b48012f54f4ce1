"""Snapshots of memory and the history of allocations. For ``torch/cuda/memory.py``, read by ``_memory_viz.py``.

A device with an allocator of its own (simulated devices) knows every block. On the others a snapshot holds the tensors
that Python holds, and the history what operators of the recording thread returned; both are reported as approximate.
A block is a segment of its own: what the target's allocator keeps in reserve is not known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torchdevice._history import Block, History
from torchdevice._journal import Fidelity
from torchdevice.bindings import supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_HISTORY, _STOP, _OBSERVERS = "memory history", "end of memory history", "out of memory observers"

APPROXIMATE_SNAPSHOT = dict.fromkeys(("cpu", "mps"), (Fidelity.APPROXIMATE, "What Python holds and operators return."))

_TOLD = "_torchdevice_told"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

_LARGE = 1 << 20
"""``kSmallSize`` of CUDA's caching allocator: larger blocks are of the large pool."""


def _history(scope: Scope) -> History:
    history = scope.settings.get(_HISTORY)
    if history is None:
        history = scope.settings[_HISTORY] = History(lambda index: scope.thread.streams.get(index, 0))
    return history


@supplies("_cuda_record_memory_history", on=APPROXIMATE_SNAPSHOT)
def record_memory_history(
    scope: Scope,
    enabled: str | None,
    context: str | None,
    stacks: str,
    max_entries: int,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: list[str] | None = None,
    record_pinned_host_memory: bool = False,
    record_cuda: bool = True,
) -> None:
    """Record allocations with the Python stack, or stop; there are no C++ frames."""
    _check(enabled, ("state", "all"), "expected state to be 'state', 'all', or None")
    _check(context, ("state", "alloc", "all"), "expected context to be 'state', 'alloc', 'all', or None")
    _check(stacks, ("python", "all"), "expected stacks to be 'python', or 'all'")
    history = _history(scope)
    if enabled is None or clear_history:
        history.clear()
    if enabled is None:
        _stop(scope)
        return
    _report(scope, "torch.cuda.memory._record_memory_history")
    history.configure(enabled, context, max_entries, frozenset(skip_actions or ()))
    if _STOP not in scope.settings:
        scope.settings[_STOP] = stop = scope.runtime.watch_allocations(history)
        scope.thread.at_exit += [lambda: _stop(scope), stop]  # another thread may have stopped it


@supplies("_cuda_record_memory_history_legacy", on=APPROXIMATE_SNAPSHOT)
def record_memory_history_legacy(
    scope: Scope,
    enabled: bool,
    record_context: bool,
    trace_alloc_max_entries: int,
    trace_alloc_record_context: bool,
    record_context_cpp: bool = False,
    clear_history: bool = False,
    *rest: Any,
) -> None:
    """The same, by its older arguments."""
    context = ("all" if trace_alloc_record_context else "state") if record_context else None
    state = "all" if enabled else None
    record_memory_history(scope, state, context, "python", trace_alloc_max_entries, clear_history)


def _stop(scope: Scope) -> None:
    stop: Callable[[], None] | None = scope.settings.pop(_STOP, None)
    if stop is not None:
        stop()


@supplies("_cuda_isHistoryEnabled")
def is_history_enabled(scope: Scope) -> bool:
    """Whether allocations are recorded."""
    return _STOP in scope.settings


@supplies("_cuda_memorySnapshot", on=APPROXIMATE_SNAPSHOT)
def memory_snapshot(scope: Scope, pool: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """The blocks in use and the recorded events, as CUDA's allocator describes its own."""
    _report(scope, "torch.cuda.memory_snapshot")
    history = _history(scope)
    others = pool is not None and pool[:2] != (0, 0)
    blocks = [] if others else [b for i in range(scope.runtime.device_count()) for b in scope.runtime.blocks(i)]
    return {
        "segments": [_segment(block, history) for block in sorted(blocks)],
        "device_traces": [] if others else history.traces(scope.runtime.device_count()),
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {},
        },
        "external_annotations": [],
    }


def _segment(block: Block, history: History) -> dict[str, Any]:
    frames = history.frames(block.address) or []
    return {
        "device": block.device,
        "address": block.address,
        "total_size": block.size,
        "allocated_size": block.size,
        "active_size": block.size,
        "requested_size": block.requested,
        "stream": 0,
        "segment_type": "large" if block.size > _LARGE else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "active_allocated",
                "frames": frames,
            }
        ],
    }


@supplies("_cuda_allocationTraceback")
def allocation_traceback(scope: Scope, address: int) -> list[dict[str, Any]] | None:
    """The lines that allocated a recorded block, or None."""
    return _history(scope).frames(address)


@supplies("_cuda_annotateMemory")
def annotate_memory(scope: Scope, address: int, metadata: str) -> None:
    """Label a recorded block in the history."""
    _history(scope).annotate(address, metadata)


@supplies("_cuda_memoryMetadataSupported")
def memory_metadata_supported(scope: Scope) -> bool:
    """True: recorded events carry the label that was set."""
    return True


@supplies("_cuda_setMemoryMetadata")
def set_memory_metadata(scope: Scope, metadata: str) -> None:
    """Set the label of this thread's events."""
    _history(scope).metadata = metadata


@supplies("_cuda_getMemoryMetadata")
def get_memory_metadata(scope: Scope) -> str:
    """The label of this thread's events."""
    return _history(scope).metadata


@supplies("_cuda_attach_out_of_memory_observer")
def attach_out_of_memory_observer(scope: Scope, observer: Callable[[int, int, int, int], None]) -> None:
    """Call the observer when memory runs out: device, bytes asked for, bytes of the device, bytes free."""
    scope.settings.setdefault(_OBSERVERS, []).append(observer)


def ran_out(scope: Scope, error: torch.OutOfMemoryError) -> None:
    """Tell the history and the observers of an error, once: it passes here with each torch function that it leaves."""
    if hasattr(error, _TOLD):
        return
    setattr(error, _TOLD, True)
    wanted = re.search(r"Tried to allocate ([\d.]+) (\w+)", str(error))
    size = int(float(wanted[1]) * _UNITS.get(wanted[2], 1)) if wanted else 0
    device = scope.thread.device_index
    index = scope.device(device).index or 0
    total, free = scope.runtime.total_memory(index), scope.runtime.free_memory(index)
    if is_history_enabled(scope):
        _history(scope).out_of_memory(index, size, free)
    for observer in scope.settings.get(_OBSERVERS, ()):
        observer(device, size, total, free)


def _report(scope: Scope, name: str) -> None:
    if not scope.runtime.exact_memory:
        scope.report(name, f"tensors of the {scope.runtime.kind} process that Python holds", Fidelity.APPROXIMATE)


def _check(value: str | None, known: tuple[str, ...], message: str) -> None:
    if value is not None and value not in known:
        raise RuntimeError(message)
