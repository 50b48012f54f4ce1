"""The history of allocations, for ``torch.cuda.memory._record_memory_history``.

A device with an allocator of its own tells a :class:`History` of each allocation. On other targets
``kernel/devices/operator_watcher.py`` tells it of the storages that operators of one thread return,
and neither of the temporary memory of a kernel nor of storages from before the recording.

Torch gathers the stacks, of Python, of TorchScript and, where asked for, of C++, as it does for
CUDA's allocator. Gathering is quick. Names and lines are looked up when they are asked for: those
of C++ take seconds for the first stack of a process.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchdevice.kernel.bindings import supplied_function
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_memory import Block, Segment
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.python import garbage_collection
from torchdevice.kernel.python.library_files import PACKAGE
from torchdevice.torch_modules.cuda import memory

_gather = torch._C._profiler.gather_traceback
_look_up = torch._C._profiler.symbolize_tracebacks

_KERNEL = "torch::impl::dispatch::PythonKernelHolder"
"""The C++ frame that calls a kernel in Python. The frames inside of it are this package's and the
interpreter's.
"""

_GATHERING = ("torch::unwind", "torch::CapturedTraceback")


class Stack:
    """The stack of this thread, innermost frame first, without this package's frames.

    Args:
        cpp: Whether it has the frames of C++.
    """

    __slots__ = ("_captured", "_frames")

    def __init__(self, cpp: bool = False):
        self._captured: Any = _gather(python=True, script=True, cpp=cpp)
        self._frames: list[dict[str, Any]] = []

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The name, file and line of each frame."""
        look_up((self,))
        return self._frames


def look_up(stacks: Iterable[Stack]) -> None:
    """Look up the frames of several stacks, which is quicker in C++ than one after the other."""
    unknown = [stack for stack in stacks if stack._captured is not None]
    for stack, frames in zip(
        unknown, _look_up([stack._captured for stack in unknown]), strict=True
    ):
        stack._frames, stack._captured = _of_the_program(frames), None


def can_unwind() -> bool:
    """Return whether torch can gather stacks of C++ here."""
    try:
        _gather(python=False, script=False, cpp=True)
    except RuntimeError:  # torch does so for Linux on x86-64 only
        return False
    return True


def _of_the_program(frames: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kernel = next(
        (at for at, frame in enumerate(frames, 1) if frame["name"].startswith(_KERNEL)), 0
    )
    outside = (frame for frame in frames[kernel:] if not frame["filename"].startswith(PACKAGE))
    return [frame for frame in outside if not frame["name"].startswith(_GATHERING)]


class History(Observer):
    """The allocations and frees, in order, with the stack of the program at each.

    Args:
        of: The context of the program.
    """

    def __init__(self, of: Context):
        self._of = of
        self._lock = threading.RLock()
        self._blocks: dict[int, tuple[Block, Stack | None]] = {}
        self.configure("state", None, 1, frozenset())

    def configure(
        self,
        kept: str,
        context: str | None,
        entries: int,
        skipped: frozenset[str],
        *,
        cpp: bool = False,
    ) -> None:
        """Choose the events to record from now on.

        Args:
            kept: ``"all"`` to keep events; ``"state"`` to keep only the blocks in use.
            context: The events whose stack is kept: None for none, ``"state"`` for blocks in use,
                ``"alloc"`` for allocations too, ``"all"`` for frees too.
            entries: The number of events that are kept; older events are dropped.
            skipped: The kinds of events that are not kept.
            cpp: Whether stacks have the frames of C++.
        """
        with self._lock:
            self._context = context
            self._skipped = skipped
            self._cpp = cpp
            # A new length keeps the newest events; a deque drops the oldest by itself.
            length = max(1, entries) if kept == "all" else 1
            self._entries = collections.deque(getattr(self, "_entries", ()), maxlen=length)

    def clear(self) -> None:
        """Drop the events."""
        with self._lock:
            self._entries.clear()

    def allocated(self, block: Block) -> None:
        """Record the allocation of a block."""
        with self._lock:
            stack = self._stack_for("state", "alloc", "all")
            self._blocks[block.address] = (block, stack)
            # In the context "state" stacks are of blocks in use, and events have none.
            self._record("alloc", block, stack if self._context != "state" else None)

    def freed(self, address: int) -> None:
        """Record the free of a block. A block from before the history began is ignored."""
        with self._lock:
            block, _ = self._blocks.pop(address, (None, None))
            if block is not None:
                stack = self._stack_for("all")
                # CUDA records two events of a free: asked for, and done.
                self._record("free_requested", block, stack)
                self._record("free_completed", block, stack)

    def segment_changed(self, action: str, segment: Block, stream: int) -> None:
        """Record that a segment got memory from the driver or gave it back."""
        with self._lock:
            # The actions that give memory back to the driver.
            contexts = ("all",) if action in ("segment_free", "segment_unmap") else ("alloc", "all")
            self._record(action, segment, self._stack_for(*contexts))

    def memory_ran_out(self, ordinal: int, wanted: int, total: int, free: int) -> None:
        """Record an allocation of ``wanted`` bytes that failed with ``free`` bytes left."""
        failed = Block(self._of.devices.target_index(ordinal), 0, wanted, wanted)
        with self._lock:
            self._record("oom", failed, self._stack_for("state", "alloc", "all"), free=free)

    def _stack_for(self, *contexts: str) -> Stack | None:
        """Return the stack of this thread if it is kept in the present context."""
        return Stack(self._cpp) if self._context in contexts else None

    def _record(
        self, action: str, block: Block, stack: Stack | None, free: int | None = None
    ) -> None:
        if action in self._skipped:
            return
        entry = {
            "action": action,
            # A simulated block has a place in its segment; elsewhere the address of the values is
            # all there is.
            "addr": block.address if block.place is None else block.place,
            "data_ptr": block.address,
            "size": block.size,
            "stream": self._of.thread.streams.get(block.device, 0),
            # Microseconds, as CUDA's allocator writes.
            "time_us": time.time_ns() // 1000,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
            "frames": stack,
        }
        if free is not None:
            # An event of memory that ran out has no block.
            del entry["addr"], entry["data_ptr"]
            entry["device_free"] = free
        self._entries.append((block.device, entry))

    def frames(self, address: int) -> list[dict[str, Any]] | None:
        """Return the stack at a block's allocation, innermost first; None if not recorded."""
        if address not in self._blocks:
            return None
        _, stack = self._blocks[address]
        return [] if stack is None else stack.frames

    def look_up(self) -> None:
        """Look up the frames of all stacks."""
        with self._lock:
            stacks = [entry["frames"] for _, entry in self._entries] + [
                stack for _, stack in self._blocks.values()
            ]
        look_up(stack for stack in stacks if stack is not None)

    def traces(self, count: int) -> list[list[dict[str, Any]]]:
        """Return a list of events for each of ``count`` devices."""
        with self._lock:
            traces: list[list[dict[str, Any]]] = [[] for _ in range(count)]
            for index, entry in self._entries:
                stack = entry["frames"]
                traces[index].append(entry | {"frames": stack.frames if stack is not None else []})
            return traces


_HISTORY, _STOP = "memory history", "end of memory history"

_HELD_BY_PYTHON = "tensors of the {} process that Python holds"


APPROXIMATE_SNAPSHOT = dict.fromkeys(
    ("cpu", "mps"),
    (Fidelity.APPROXIMATE, "Covers tensors that Python holds and results of operators."),
)
"""The fidelity of snapshots and the history on targets whose allocator records none."""


def _history(context: Context) -> History:
    if _HISTORY not in context.settings:
        context.settings[_HISTORY] = History(context)
    return context.settings[_HISTORY]


@supplied_function("_cuda_record_memory_history", on=APPROXIMATE_SNAPSHOT)
def record_memory_history(
    active: Context,
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
    """Start to record allocations with their stack, or stop."""
    _check(enabled, ("state", "all"), "expected state to be 'state', 'all', or None")
    _check(
        context,
        ("state", "alloc", "all"),
        "expected context to be 'state', 'alloc', 'all', or None",
    )
    _check(stacks, ("python", "all"), "expected stacks to be 'python', or 'all'")
    history = _history(active)
    if enabled is None or clear_history:
        history.clear()
    if enabled is None:
        _stop(active)
        return
    memory.report(active, "torch.cuda.memory._record_memory_history", _HELD_BY_PYTHON)
    cpp = stacks == "all" and can_unwind()
    if stacks == "all" and not cpp:
        active.report(
            "torch.cuda.memory._record_memory_history", "stacks without C++", Fidelity.APPROXIMATE
        )
    history.configure(enabled, context, max_entries, frozenset(skip_actions or ()), cpp=cpp)
    if _STOP not in active.settings:
        stop = active.settings[_STOP] = active.observers.add(history)
        # Not _stop() alone: where another thread has stopped the recording, this thread's stack
        # still has the watcher.
        active.thread.at_exit += [lambda: _stop(active), stop]


@supplied_function("_cuda_record_memory_history_legacy", on=APPROXIMATE_SNAPSHOT)
def record_memory_history_legacy(
    context: Context,
    enabled: bool,
    record_context: bool,
    trace_alloc_max_entries: int,
    trace_alloc_record_context: bool,
    record_context_cpp: bool = False,
    clear_history: bool = False,
    *rest: Any,
) -> None:
    """Start or stop recording, with the older arguments of ``_record_memory_history``."""
    stacks_of = None
    if record_context:
        stacks_of = "all" if trace_alloc_record_context else "state"
    kept = "all" if enabled else None
    record_memory_history(
        context, kept, stacks_of, "python", trace_alloc_max_entries, clear_history
    )


def _stop(context: Context) -> None:
    stop: Callable[[], None] | None = context.settings.pop(_STOP, None)
    if stop is not None:
        stop()


@supplied_function("_cuda_isHistoryEnabled")
def is_history_enabled(context: Context) -> bool:
    """Return whether allocations are recorded."""
    return _STOP in context.settings


@supplied_function("_cuda_memorySnapshot", on=APPROXIMATE_SNAPSHOT)
def memory_snapshot(context: Context, pool: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """Return the blocks in use and the recorded events, in the format of CUDA's allocator."""
    memory.report(context, "torch.cuda.memory_snapshot", _HELD_BY_PYTHON)
    history = _history(context)
    history.look_up()
    wanted = None if pool is None or tuple(pool[:2]) == (0, 0) else tuple(pool[:2])
    devices = range(context.runtime.device_count())
    # Which would begin several times over, to find that all of this is in use.
    with garbage_collection.paused():
        return {
            "segments": [
                _segment(segment, history)
                for index in devices
                for segment in context.runtime.supplied.segments(index)
                if wanted is None or segment.segment_pool_id == wanted
            ],
            "device_traces": history.traces(len(devices)) if wanted is None else [],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
                **memory.SNAPSHOT_SETTINGS,
                **context.runtime.supplied.allocator_settings(),
            },
            "external_annotations": [],
        }


_NOT_SHOWN = ("is_large", "parts")
"""Fields of a segment that a snapshot shows by other keys."""


def _segment(segment: Segment, history: History) -> dict[str, Any]:
    parts = segment.parts
    blocks = [{**part._asdict(), "frames": history.frames(part.data_ptr) or []} for part in parts]
    active = [part for part in parts if part.state != "inactive"]
    own = {name: value for name, value in segment._asdict().items() if name not in _NOT_SHOWN}
    return {
        **own,
        "address": parts[0].address,
        "total_size": sum(part.size for part in parts),
        "allocated_size": sum(part.size for part in active if part.state == "active_allocated"),
        "active_size": sum(part.size for part in active),
        "requested_size": sum(part.requested_size for part in active),
        "segment_type": "large" if segment.is_large else "small",
        "frames": blocks[0]["frames"],
        "blocks": blocks,
    }


@supplied_function("_cuda_allocationTraceback")
def allocation_traceback(context: Context, address: int) -> list[dict[str, Any]] | None:
    """Return the stack at the allocation of a block, or None if the block is not recorded."""
    return _history(context).frames(address)


@supplied_function("_cuda_attach_out_of_memory_observer")
def attach_out_of_memory_observer(
    context: Context, observer: Callable[[int, int, int, int], None]
) -> None:
    """Call ``observer(device, requested, total, free)``, in bytes, when memory runs out."""
    context.observers.add(_OutOfMemory(observer))


class _OutOfMemory(Observer):
    """Calls a function of the program when memory runs out."""

    def __init__(self, function: Callable[[int, int, int, int], None]):
        self._function = function

    def memory_ran_out(self, ordinal: int, wanted: int, total: int, free: int) -> None:
        self._function(ordinal, wanted, total, free)


def _check(value: str | None, known: tuple[str, ...], message: str) -> None:
    if value is not None and value not in known:
        raise RuntimeError(message)
