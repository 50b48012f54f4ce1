"""What of ``torch.xpu`` no binding stands under: its streams and events, and two functions of its modules."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from torchdevice._patching import Patch, Replaced, per_scope, replaced_everywhere, replaced_function
from torchdevice.bindings import device
from torchdevice.bindings.xpu import FAMILY, XPU_DEVICE_TYPE, get_device_count
from torchdevice.shims import cuda_module
from torchdevice.shims.stream_types import EventStandIn, StreamStandIn, new_stream

if TYPE_CHECKING:
    from torchdevice._scope import Scope


class XpuStreamStandIn(StreamStandIn):
    """A stream of a program written for XPU."""

    module = torch.xpu
    torch_device_type = XPU_DEVICE_TYPE


class XpuEventStandIn(EventStandIn):
    """An event of a program written for XPU."""

    module = torch.xpu


class _InitializedFlag(cuda_module.InitializedFlag):
    """``torch.xpu._initialized``."""

    family = FAMILY
    device_count = inspect.unwrap(torch.xpu.device_count).__code__


def _new_stream(scope: Scope, original: Any, cls: type, *args: Any, **kwargs: Any) -> StreamStandIn:
    return new_stream(scope, XpuStreamStandIn, *args, **kwargs)


def _new_event(
    scope: Scope,
    original: Any,
    cls: type,
    enable_timing: bool = False,
    blocking: bool = False,
    interprocess: bool = False,
) -> EventStandIn:
    return XpuEventStandIn(scope, enable_timing)


def _device_count(scope: Scope, original: Any) -> int:
    """What torch 2.10 keeps for the process."""
    return get_device_count(scope)


def _uninitialized(index: int) -> Any:
    raise AttributeError("module 'torch.xpu' has no attribute '_get_device_properties'")


def _device_properties(scope: Scope, original: Any, index: int) -> device.DeviceProperties:
    return device.properties(scope, index)


def patches() -> list[Patch]:
    """Return the patches of ``torch.xpu``."""
    return [
        Replaced(torch.xpu, "_initialized", _InitializedFlag),
        replaced_everywhere(torch.xpu, "device_count", _device_count, family=FAMILY),
        replaced_function(torch.xpu.Stream, "__new__", _new_stream, family=FAMILY),
        replaced_function(torch.xpu.Event, "__new__", _new_event, family=FAMILY),
        Replaced(
            torch.xpu,
            "_get_device_properties",
            lambda original: per_scope(original or _uninitialized, _device_properties, family=FAMILY),
            may_be_absent=True,
        ),
        replaced_everywhere(torch.xpu._utils, "_get_device_index", cuda_module.get_device_index, family=FAMILY),
    ]
