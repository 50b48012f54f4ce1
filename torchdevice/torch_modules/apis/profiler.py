"""The profilers: CUDA activity shows the target's times.

torch times CUDA's kernels through NVIDIA's CUPTI. On a target whose calls return when the work is
done, an operator's device time is its CPU time. On an asynchronous target (MPS) device times stay
0.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity
from torch.profiler import profiler as kineto_profiler

from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity

_OPERATOR = re.compile(r"\w+::\w+")
"""Matches the name of an operator, and not the autograd engine's ``autograd::engine::...``."""


class _Reported(str):
    """A profiler's device, reported where the program made it: a schedule makes more later."""


class DeviceEvent(FunctionEvent):
    """An event of a synchronous target, on which an operator's device time is its CPU time."""

    @property
    def device_time_total(self) -> float:
        """Microseconds of the event's operator and of the operators that it calls."""
        nested = sum(child.device_time_total for child in self.cpu_children)
        return self.self_device_time_total + nested

    @property
    def self_device_time_total(self) -> float:
        """Microseconds of the event's operator without nested operators; 0 for ranges."""
        return self.self_cpu_time_total if _OPERATOR.fullmatch(self.name) else 0


@replaces(kineto_profiler._KinetoProfile, "__init__", native_to="cuda")
def _init_kineto(context: Context, original: Any, self: Any, **kwargs: Any) -> None:
    activities = kwargs.get("activities")
    wanted = activities is None or ProfilerActivity.CUDA in activities
    if wanted:
        kwargs["activities"] = {ProfilerActivity.CPU, *(activities or ())} - {ProfilerActivity.CUDA}
    original(self, **kwargs)
    if wanted:
        self.use_device = _Reported("cuda")
        _report(context)


@replaces(autograd_profiler.profile, "__init__", native_to="cuda")
def _init_autograd(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    device = bound.arguments.get("use_device")
    wanted = device == "cuda" or bound.arguments.get("use_cuda")
    if wanted:
        bound.arguments.update(use_device=None, use_cpu=True)
        bound.arguments.pop("use_cuda", None)
    original(*bound.args, **bound.kwargs)
    if wanted and self.enabled:
        if not isinstance(device, _Reported):
            _report(context)
        if not context.runtime.is_asynchronous:
            self._parse_kineto_results = functools.partial(
                _with_device_times, self, self._parse_kineto_results
            )


def _report(context: Context) -> None:
    context.report(
        "the profiler's CUDA activity",
        f"times of the {context.names.family} target",
        Fidelity.APPROXIMATE,
    )


def _with_device_times(profiler: Any, parse: Any, *args: Any, **kwargs: Any) -> list[FunctionEvent]:
    """Parse recorded events and add device times. The profiler may do this after the scope."""
    profiler.use_device = "cuda"
    events = parse(*args, **kwargs)
    for event in events:
        event.__class__ = DeviceEvent
        # Makes the table sum the device times of operators instead of kernels.
        event.is_legacy = True
    return events


@replaces(autograd_profiler.emit_nvtx, "__enter__", native_to="cuda")
def _enter_emit_nvtx(context: Context, original: Any, self: Any) -> Any:
    if self.enabled:
        context.report("emit_nvtx", "no ranges; use torch.profiler", Fidelity.INERT)
        self.enabled = False
    return original(self)
