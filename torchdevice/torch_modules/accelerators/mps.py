"""``torch.mps`` on devices that are not Apple's, for ``torch/mps`` and ``torch/backends/mps``.

Its functions work in a program written for MPS. In others they are absent, as on a machine without
MPS, because a program that supports several accelerators uses the first one that it finds.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch

from torchdevice.kernel.bindings import (
    Supplied,
    add,
    replaces,
    supplied_as,
    supplied_function,
    supplied_value,
)
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import TORCHS_OWN, without_cache, without_original
from torchdevice.torch_modules.cuda import memory
from torchdevice.torch_modules.cuda.streams import EventStandIn, StreamStandIn, current_stream

_MPS = "mps"


MACOS = (14, 0)
"""The version of macOS that is reported: the oldest with bfloat16 on MPS."""


_ids = itertools.count(1)


def _index(context: Context) -> int:
    return context.devices.target_index(context.thread.device_index)


@supplied_function("_mps_is_available", native_to=_MPS, denies=lambda: False)
def is_available(context: Context) -> bool:
    """Return whether the program is written for MPS."""
    return context.program == _MPS


supplied_value("torch._C._has_mps", native_to=_MPS, denies=False)(is_available)

_LIKE_CUDA = {
    "is_in_bad_fork": "isInBadFork",
    "deviceSynchronize": "synchronize",
    "emptyCache": "emptyCache",
}
"""The functions of ``torch._C`` with a counterpart among CUDA's."""

for _name, _of_cuda in _LIKE_CUDA.items():
    supplied_as(f"torch._C._mps_{_name}", f"torch._C._cuda_{_of_cuda}", native_to=_MPS)


@supplied_function(
    "_mps_is_on_macos_or_newer", Fidelity.APPROXIMATE, note="macOS 14.0", native_to=_MPS
)
def is_on_macos_or_newer(context: Context, major: int, minor: int = 0) -> bool:
    """Return whether macOS 14.0 is that version or a newer one."""
    return (major, minor) <= MACOS


@supplied_function("_mps_get_name", native_to=_MPS)
def get_name(context: Context) -> str:
    """Return the name of the target."""
    return context.runtime.name(_index(context))


@supplied_function("_mps_get_core_count", native_to=_MPS)
def get_core_count(context: Context) -> int:
    """Return the number of units of the target that compute in parallel."""
    return context.runtime.multiprocessor_count()


@supplied_function("_mps_get_default_generator", native_to=_MPS)
def get_default_generator(context: Context) -> torch.Generator:
    """Return the target's default generator."""
    return context.runtime.default_generator(_index(context))


@supplied_function(
    "_mps_currentAllocatedMemory", native_to=_MPS, on={"cpu": memory.APPROXIMATE_FIGURES["cpu"]}
)
def current_allocated_memory(context: Context) -> int:
    """Return the bytes that tensors of the target occupy."""
    memory.report(context, "torch.mps.current_allocated_memory")
    return context.runtime.memory(_index(context)).allocated


@supplied_function(
    "_mps_driverAllocatedMemory", native_to=_MPS, on={"cpu": memory.APPROXIMATE_FIGURES["cpu"]}
)
def driver_allocated_memory(context: Context) -> int:
    """Return the bytes that the target's allocator has reserved."""
    memory.report(context, "torch.mps.driver_allocated_memory")
    return context.runtime.memory(_index(context)).reserved


@supplied_function("_mps_recommendedMaxMemory _mps_maxBufferLength", native_to=_MPS)
def recommended_max_memory(context: Context) -> int:
    """Return the bytes of the target's memory: one tensor may occupy all of it."""
    return memory.total(context, context.thread.device_index)


@supplied_function("_mps_setMemoryFraction", native_to=_MPS, on=memory.LIMITS)
def set_memory_fraction(context: Context, fraction: float) -> None:
    """Limit the memory of a simulated device. On other targets the fraction is only stored."""
    # 0 lifts the limit.
    memory.set_memory_fraction(context, fraction or None, context.thread.device_index)


# ---- events --------------------------------------------------------------------------------------


_events: dict[int, EventStandIn] = {}


@supplied_function("_mps_acquireEvent", native_to=_MPS)
def acquire_event(context: Context, enable_timing: bool) -> int:
    """Make an event and return its id."""
    number = -next(_ids)  # negative, so that torch does not release it by itself after the scope
    _events[number] = EventStandIn(context, enable_timing)
    return number


@supplied_function("_mps_releaseEvent", native_to=_MPS)
def release_event(context: Context, event: int) -> None:
    """Drop an event."""
    _events.pop(event, None)


def _supply_method(name: str, method: str, note: str) -> None:
    @supplied_function(f"_mps_{name}", note=note, native_to=_MPS)
    def of_event(context: Context, event: int) -> Any:
        return getattr(_events[event], method)()


_supply_method(
    "recordEvent", "record", "Record the present point of the target's work in an event."
)
_supply_method(
    "waitForEvent",
    "wait",
    "Make later work wait. The target runs all work in the order of submission.",
)
_supply_method("queryEvent", "query", "Return whether the work before the event is done.")
_supply_method("synchronizeEvent", "synchronize", "Wait for the work before the event.")


@supplied_function("_mps_elapsedTimeOfEvents", native_to=_MPS)
def elapsed_time_of_events(context: Context, start: int, end: int) -> float:
    """Return the milliseconds between two events.

    Raises:
        RuntimeError: An event has no timing, or was not recorded, or the events were recorded in
            the other order.
    """
    first, last = _events[start], _events[end]
    first.synchronize()
    last.synchronize()
    try:
        elapsed = first.elapsed_time(last)
    except ValueError:
        raise RuntimeError("Events were not created with argument 'enable_timing=True'") from None
    if elapsed < 0:
        raise RuntimeError(f"End event {end} was not recorded after start event {start}")
    return elapsed


# ---- streams, which torch 2.15 and later have ----------------------------------------------------


@replaces(
    getattr(torch.mps, "streams", None),
    "current_stream",
    "default_stream",
    native_to=_MPS,
    by_value=True,
)
def _only_stream(context: Context, original: Any) -> StreamStandIn:
    return current_stream(context, context.thread.device_index)


@supplied_function("_mps_setStream", native_to=_MPS)
def set_stream(context: Context, stream: StreamStandIn) -> None:
    """Do nothing: all work is in one stream."""


# ---- what torch's own Python asks of the module of any accelerator -------------------------------


def _of_program(name: str, context: Context) -> Any:
    """Return a name that ``torch.mps`` lacks, for a program of another accelerator run on MPS.

    torch takes the module by the type of a tensor's device, in ``UntypedStorage.cuda`` and in
    checkpoints, which do not keep random numbers without these names.
    """
    if name in context.runtime.support.lacks_in_module:
        return getattr(getattr(torch, context.program), name)
    return TORCHS_OWN


for _name in ("device", "_initialized"):
    _value = functools.partial(_of_program, _name)
    add(Supplied(f"torch.mps.{_name}", _value, Fidelity.EXACT, f"that of `torch.cuda.{_name}`"))


# ---- tracing and Metal ---------------------------------------------------------------------------


@supplied_function(
    "_mps_profilerStartTrace", Fidelity.INERT, note="there are no OS signposts", native_to=_MPS
)
def profiler_start_trace(context: Context, mode: str, wait_until_completed: bool) -> None:
    """Do nothing: there are no OS signposts."""


@replaces(torch.mps.Event, "__del__")
def _delete_event(context: Context, original: Any, self: torch.mps.Event) -> None:
    release_event(context, vars(self).get("_Event__eventId", 0))


_CACHED = ("is_available", "is_macos_or_newer", "is_macos13_or_newer", "get_name", "get_core_count")
"""Functions of ``torch.backends.mps`` whose answers torch caches for the process."""

replaces(torch.backends.mps, *_CACHED, optional=True)(without_cache)
replaces(torch.mps, "_get_default_mps_generator")(without_original(get_default_generator))
