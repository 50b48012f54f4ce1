"""``torch.mps`` on devices that are not Apple's. For ``torch/mps`` and ``torch/backends/mps``.

Its functions answer in every scope. Whether MPS *is available* they say by what the program is written for: programs
that know several accelerators ask for each, and take the first.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from torchdevice._journal import Fidelity
from torchdevice._runtimes import Mark
from torchdevice.bindings import answers, memory, supplies
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope

_FAMILY = "mps"

MACOS = (14, 0)
"""The version of macOS that is answered: the oldest that has bfloat16 on MPS."""

_ids = itertools.count(1)


def _index(scope: Scope) -> int:
    return scope.device(scope.thread.device_index).index or 0


@answers("torch._C._has_mps", family=_FAMILY)
def has_mps(scope: Scope) -> bool:
    """Whether the program is written for MPS."""
    return scope.written_for == _FAMILY


@supplies("_mps_is_available", family=_FAMILY)
def is_available(scope: Scope) -> bool:
    """Whether the program is written for MPS."""
    return scope.written_for == _FAMILY


@supplies("_mps_is_in_bad_fork", family=_FAMILY)
def is_in_bad_fork(scope: Scope) -> bool:
    """False: a stand-in survives a fork."""
    return False


@supplies("_mps_is_on_macos_or_newer", Fidelity.APPROXIMATE, note="macOS 14.0", family=_FAMILY)
def is_on_macos_or_newer(scope: Scope, major: int, minor: int = 0) -> bool:
    """Whether macOS 14.0 is that new."""
    return (major, minor) <= MACOS


@supplies("_mps_is_on_macos_13_or_newer", Fidelity.APPROXIMATE, note="macOS 14.0", family=_FAMILY)
def is_on_macos_13_or_newer(scope: Scope, minor: int = 0) -> bool:
    """True: macOS 14.0 is."""
    return True


@supplies("_mps_get_name", family=_FAMILY)
def get_name(scope: Scope) -> str:
    """The name of the device that stands in."""
    return scope.runtime.name(_index(scope))


@supplies("_mps_get_core_count", family=_FAMILY)
def get_core_count(scope: Scope) -> int:
    """The units of the target that compute in parallel."""
    return scope.runtime.multiprocessor_count()


@supplies("_mps_get_default_generator", family=_FAMILY)
def get_default_generator(scope: Scope) -> torch.Generator:
    """The target's default generator."""
    return scope.runtime.default_generator(_index(scope))


@supplies("_mps_deviceSynchronize", family=_FAMILY)
def device_synchronize(scope: Scope) -> None:
    """Wait for the target's work."""
    scope.runtime.synchronize(_index(scope))


@supplies("_mps_emptyCache", family=_FAMILY)
def empty_cache(scope: Scope) -> None:
    """Give the target's unused memory back."""
    scope.runtime.empty_cache()


@supplies("_mps_currentAllocatedMemory", family=_FAMILY, on={"cpu": memory.APPROXIMATE_FIGURES["cpu"]})
def current_allocated_memory(scope: Scope) -> int:
    """Bytes that tensors of the target have."""
    memory.report(scope, "torch.mps.current_allocated_memory")
    return scope.runtime.memory(_index(scope)).allocated


@supplies("_mps_driverAllocatedMemory", family=_FAMILY, on={"cpu": memory.APPROXIMATE_FIGURES["cpu"]})
def driver_allocated_memory(scope: Scope) -> int:
    """Bytes that the target's allocator has."""
    memory.report(scope, "torch.mps.driver_allocated_memory")
    return scope.runtime.memory(_index(scope)).reserved


@supplies("_mps_recommendedMaxMemory", family=_FAMILY)
def recommended_max_memory(scope: Scope) -> int:
    """Bytes of memory of the target."""
    return memory.total(scope, scope.thread.device_index)


@supplies("_mps_maxBufferLength", family=_FAMILY)
def max_buffer_length(scope: Scope) -> int:
    """Bytes of memory of the target: one tensor may have all of it."""
    return memory.total(scope, scope.thread.device_index)


@supplies("_mps_setMemoryFraction", family=_FAMILY, on=memory.LIMITS)
def set_memory_fraction(scope: Scope, fraction: float) -> None:
    """The limit on simulated devices; elsewhere stored, and allocations are not limited."""
    memory.set_memory_fraction(scope, fraction or None, scope.thread.device_index)  # 0 lifts the limit


# ---- events ----------------------------------------------------------------------------------------------------------


class _Event:
    """An event of ``torch.mps``: a point in the target's work, or none yet."""

    __slots__ = ("mark", "timing")

    def __init__(self, timing: bool):
        self.timing = timing
        self.mark: Mark | None = None


_events: dict[int, _Event] = {}


@supplies("_mps_acquireEvent", family=_FAMILY)
def acquire_event(scope: Scope, enable_timing: bool) -> int:
    """The id of a new event: negative, so that torch does not release it itself when the scope has ended."""
    number = -next(_ids)
    _events[number] = _Event(enable_timing)
    return number


@supplies("_mps_releaseEvent", family=_FAMILY)
def release_event(scope: Scope, event: int) -> None:
    """Forget an event."""
    _events.pop(event, None)


@supplies("_mps_recordEvent", family=_FAMILY)
def record_event(scope: Scope, event: int) -> None:
    """Let an event mean this point of the target's work."""
    _events[event].mark = scope.runtime.mark(_index(scope), timing=_events[event].timing)


@supplies("_mps_waitForEvent", family=_FAMILY)
def wait_for_event(scope: Scope, event: int) -> None:
    """Nothing to wait for: the target works in order."""


@supplies("_mps_queryEvent", family=_FAMILY)
def query_event(scope: Scope, event: int) -> bool:
    """Whether the work before the event is done."""
    mark = _events[event].mark
    return mark is None or mark.query()


@supplies("_mps_synchronizeEvent", family=_FAMILY)
def synchronize_event(scope: Scope, event: int) -> None:
    """Wait for the work before the event."""
    mark = _events[event].mark
    if mark is not None:
        mark.synchronize()


@supplies("_mps_elapsedTimeOfEvents", family=_FAMILY)
def elapsed_time_of_events(scope: Scope, start: int, end: int) -> float:
    """Milliseconds between two events that were made with timing and recorded."""
    first, last = _events[start], _events[end]
    if not (first.timing and last.timing) or first.mark is None or last.mark is None:
        raise RuntimeError("Events were not created with argument 'enable_timing=True'")
    elapsed = first.mark.elapsed_time(last.mark)
    if elapsed < 0:
        raise RuntimeError(f"End event {end} was not recorded after start event {start}")
    return elapsed


# ---- streams ---------------------------------------------------------------------------------------------------------


@supplies("_mps_getCurrentStream", family=_FAMILY)
def get_current_stream(scope: Scope) -> Any:
    """This thread's current stream."""
    return torch.mps.Stream(stream_id=scope.thread.streams.get(scope.thread.device_index, 0))


@supplies("_mps_setStream", family=_FAMILY)
def set_stream(scope: Scope, stream: Any) -> None:
    """Make a stream current in this thread."""
    scope.thread.streams[scope.thread.device_index] = stream.stream_id


# ---- tracing and Metal -----------------------------------------------------------------------------------------------


@supplies("_mps_profilerStartTrace", Fidelity.INERT, note="there are no OS signposts", family=_FAMILY)
def profiler_start_trace(scope: Scope, mode: str, wait_until_completed: bool) -> None:
    """Nothing to trace."""


@supplies("_mps_profilerStopTrace", Fidelity.INERT, note="there are no OS signposts", family=_FAMILY)
def profiler_stop_trace(scope: Scope) -> None:
    """Nothing to stop."""


@supplies("_mps_isCaptureEnabled", family=_FAMILY)
def is_capture_enabled(scope: Scope) -> bool:
    """False: there is no Metal to capture."""
    return False


@supplies("_mps_isCapturing", family=_FAMILY)
def is_capturing(scope: Scope) -> bool:
    """False: there is no Metal to capture."""
    return False


@supplies("_mps_stopCapture", Fidelity.INERT, note="there is no Metal to capture", family=_FAMILY)
def stop_capture(scope: Scope) -> None:
    """Nothing to stop."""


_METAL = "It needs Metal. Use a torch function, or torch.profiler to see what runs."


def _refuse(name: str) -> None:
    def refuse(scope: Scope, *args: Any) -> Any:
        raise NotSupportedError(f"torch._C.{name}", _METAL)

    supplies(name, Fidelity.UNSUPPORTED, note=_METAL, family=_FAMILY)(refuse)


for _name in (
    "_mps_compileShader",
    "_mps_host_alias_storage",
    "_mps_loadMetallibFromPath",
    "_mps_loadMetalllib",
    "_mps_startCapture",
):
    _refuse(_name)
