"""``torch.load`` and ``torch.save`` of storages tagged cuda, mps or xpu.

``torch.serialization.register_package`` registers functions for both. The entry is removed with the
last scope.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import serialization
from torch.utils.weak import WeakIdKeyDictionary

from torchdevice.calls import moves
from torchdevice.calls.lacking import float64_policy
from torchdevice.calls.lacking.doubles import HostDouble
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import REPLACED, replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.device_strings import Spelling, parse
from torchdevice.kernel.patching import Callback

_PRIORITY = 5  # torch asks in ascending order; its own entries have 10 (cpu) and more


def _tag(storage: Any) -> str | None:
    """Return the tag of a saved storage of a simulated device, or None to let torch choose the tag.

    The tag names the accelerator that the device simulates, so that other machines can load the
    file.
    """
    context, kind = thread_state.state.context, storage.device.type
    if (
        context is None
        or context.runtime.supplied.location_tag == context.device_type
        or kind != context.device_type
    ):
        return None
    return f"{context.runtime.supplied.location_tag}:{storage.device.index}"


_DEVICE_NOT_THERE = (
    "Attempting to deserialize object on {kind} device {index} but "
    "torch.{accelerator}.device_count() is {count}. Please use torch.load with map_location to map "
    "your storages to an existing device."
)


def _deserialize(storage: Any, location: str) -> Any:
    """Return the storage on the device for its tag, or None to let torch try its next entry."""
    context = thread_state.state.context
    if context is None:
        return None
    spelling = parse(location)
    if spelling is not None:
        if (
            context.devices.count
            and spelling.index is not None
            and not context.devices.accepts(spelling.index)
        ):
            kind, count = spelling.accelerator.upper(), context.devices.count
            raise RuntimeError(_DEVICE_NOT_THERE.format(kind=kind, count=count, **vars(spelling)))
        # A file is not the program: the same program wrote it, on another target.
        known = spelling.accelerator in (context.names.family, *context.names.families)
        device = context.redirect(
            location if known else str(Spelling(context.program, spelling.index))
        )
    else:  # map_location may be a device that is rewritten already
        rewritten = (
            location.partition(":")[0] == context.device_type
            and not context.runtime.shares_host_memory
        )
        device = torch.device(location) if rewritten else None
    if device is None:
        return None
    if context.runtime.shares_host_memory:
        moves.mark_storage(storage, moves.Side.DEVICE)
    return storage.to(device=device)


@replaces(serialization, "_get_restore_location")
def _restore_location(context: Context, original: Any, map_location: Any) -> Any:
    """Return a function that restores storages to devices, and on a CPU target marks their side.

    Without a mark, loaded memory would count as the host's, as NumPy's does, also where the program
    meant the device.
    """
    restore = functools.partial(_restored, context, original(map_location), map_location)
    if not context.runtime.shares_host_memory:
        return restore
    side = moves.side_meant(context, map_location, None)  # None of a mapping or a function
    return lambda storage, location: moves.mark_unmarked(restore(storage, location), side)


def _restored(
    context: Context, restore: Any, map_location: Any, storage: Any, location: str
) -> Any:
    """Put a storage on its device: one of a family that the program does not use by torch itself.

    That is a family that the program names, or the file where a program runs on its own
    accelerator: without this package it would find the same.
    """
    natively = map_location is None and context.runtime.supplied.location_tag == context.program
    named = location if natively else map_location
    spelling = parse(named) if isinstance(named, (str, torch.device)) else None
    own = (context.names.family, *context.names.families)
    foreign = spelling is not None and spelling.accelerator not in own
    with thread_state.suspended() if foreign else contextlib.nullcontext():
        return restore(storage, location)


_whole: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""A loaded storage -> all of it as a tensor in a dtype that the target can hold."""


@replaces(torch._utils, "_rebuild_tensor")
def _rebuild(
    context: Context, original: Any, storage: Any, offset: int, size: Any, stride: Any
) -> torch.Tensor:
    """``torch._utils._rebuild_tensor``: convert storages of missing dtypes once for all views."""
    untyped = storage._untyped_storage
    if (
        storage.dtype not in context.dtypes.unsupported
        or untyped.device.type != context.device_type
    ):
        return original(storage, offset, size, stride)
    whole = _whole.get(untyped)
    if whole is None:
        host = torch.empty(0, dtype=storage.dtype, device="cpu").set_(untyped.cpu())
        whole = _whole[untyped] = float64_policy.place(
            context, host, context.devices.at(untyped.device.index or 0)
        )
    if isinstance(whole, HostDouble):
        return whole.as_strided(size, stride, offset)
    return torch.empty(0, dtype=whole.dtype, device=whole.device).set_(
        whole.untyped_storage(), offset, size, stride
    )


_PACKAGE = _PRIORITY, _tag, _deserialize

_packages: list[Any] = serialization._package_registry


def _register() -> None:
    if _PACKAGE not in _packages:  # torch's list keeps duplicates
        serialization.register_package(*_PACKAGE)


def _unregister() -> None:
    # On one line: a signal handler or destructor may remove the entry, too.
    _packages.remove(_PACKAGE) if _PACKAGE in _packages else None


REPLACED.append(Callback(_register, _unregister))
