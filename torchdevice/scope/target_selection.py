"""Chooses the target: the device that stands in for the program's accelerator.

The target is that of the call, else that of ``TORCHDEVICE_TARGET``, else the first available of
CUDA, MPS, XPU, a PrivateUse1 backend and the CPU. It is chosen when a scope is entered, never at
import.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

import torch

from torchdevice.errors import TargetUnavailableError, UnknownTargetError
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import FAMILIES, OTHER_NAMES
from torchdevice.kernel.devices.mps_runtime import MpsRuntime
from torchdevice.kernel.devices.registry import registered, runtime
from torchdevice.kernel.devices.runtime import Runtime, device_of
from torchdevice.kernel.feature import Targets
from torchdevice.kernel.options import Target, of_device
from torchdevice.random_numbers.runtimes import with_gpu_numbers
from torchdevice.scope import collected_options as _options
from torchdevice.scope import features
from torchdevice.scope.collected_options import Options

_NO_MAC = (
    "torch.backends.mps.is_available() is False: it needs macOS on Apple silicon. Use "
    "'simulated:mps' for a simulated Mac, or leave the target out."
)

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

_ALLOCATING = "aten::empty.memory_format"


def resolve(options: Options) -> tuple[Runtime, Options]:
    """Return the target's runtime, and the options without those that contradict the target.

    Raises:
        UnknownTargetError: The target is not a device type of the installed torch.
        TargetUnavailableError: The target is a device type, but not available here.
        ValueError: An option contradicts the target.
    """
    machine = machine_of(options)
    with thread_state.suspended():
        name = _name_of(options.target)
        answering = features.answering(name)
        found = None
        if machine is not None:
            found, options = _on_machine(machine, options)
        elif answering is None:
            found = _best() if name is None else _named(options.target, name)
        fitting = options.for_target(_facts(name, answering, found))
        if found is None:
            assert answering is not None and name is not None
            if not answering.exists(name):
                raise _unknown(name, name)
            found, fitting = answering.runtime(name, fitting)
        if fitting.random == "cuda" and not found.supplied.is_gpu:
            found = with_gpu_numbers(found)
        return found, fitting


def _facts(name: str | None, answering: Targets | None, found: Runtime | None) -> Target:
    """Return the facts about a target. Its feature has no runtime to ask yet."""
    if answering is not None and name is not None:
        return answering.facts(name)
    shares_host_memory = found is not None and found.shares_host_memory
    return Target(shares_host_memory=shares_host_memory)


def _best() -> Runtime:
    """Return the runtime of the first accelerator that is available here, else that of the CPU."""
    available = (each for each in target_names() if each != "cpu" and runtime(each).is_available())
    return runtime(next(available, "cpu"))


def machine_of(options: Options) -> Context | None:
    """Return the context of a feature's machine for a scope with these options.

    None for this machine.
    """
    name = _name_of(options.target)
    answering = features.answering(name)
    if answering is not None and name is not None:
        return answering.machine(name, options)
    return machine_around() if name in (None, MpsRuntime.device_type) else None


def machine_around() -> Context | None:
    """Return the innermost machine of a feature that this thread is on; None if there is none."""
    for entry in reversed(thread_state.state.entries):
        context = entry.context
        if context is not None:
            machine: Context | None = context.runtime.supplied.machine(context)
            if machine is not None:
                return machine
    return None


def _on_machine(machine: Context, options: Options) -> tuple[Runtime, Options]:
    answering = features.answering(machine.runtime.target)
    assert answering is not None, "a machine belongs to a feature"
    return answering.runtime_on(machine, options)


def names_count(target: object) -> bool:
    """Return whether a target's name has a number of devices, like ``"simulated:cuda:2"``."""
    answering = features.answering(target)
    return answering is not None and answering.facts(str(target)).names_count


def without_count(target: str) -> str:
    """Return a target's name without a number of devices: ``"simulated:cuda"``."""
    answering = features.answering(target)
    return target if answering is None else answering.without_count(target)


def check_exists(target: str) -> None:
    """Check the name of a feature's target.

    Raises:
        UnknownTargetError: No feature has such a target.
    """
    answering = features.answering(target)
    if answering is None or not answering.exists(target):
        raise _unknown(target, target)


def devices_of_ranks(target: object, written_for: object) -> dict[str, Any]:
    """Return the ``devices`` that give each rank of this host one, if the target has fewer.

    torchrun sets the number of ranks of a host. A number of devices in the target's name, a
    variable or a flag counts more than this one.

    Args:
        target: What was asked for.
        written_for: The accelerator of the program, where it was named.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(told) if told.isdecimal() else 1
    if ranks == 1:
        return {}
    answering = features.answering(target)
    if answering is not None:
        check_exists(str(target))
        has_few = answering.has_too_few(str(target), ranks, written_for)
    elif target is None or target in target_names():
        found = _best() if target is None else runtime(str(target))
        has_few = found.device_count() < ranks
    else:  # an error when the scope begins
        has_few = False
    return {"devices": ranks} if has_few else {}


def target_names() -> tuple[str, ...]:
    """Return the names of real devices that :func:`resolve` understands."""
    private = torch._C._get_privateuse1_backend_name()
    conventional = (
        [private] if hasattr(torch, private) and private not in features.prefixes() else []
    )
    return (*FAMILIES, "cpu", *dict.fromkeys([*registered(), *conventional]))


def known_targets() -> tuple[str, ...]:
    """Return all possible targets' names, available or not: real ones, and those of features."""
    return (*target_names(), *(name for each in features.all_targets() for name in each.known()))


def _name_of(target: str | torch.device | None) -> str | None:
    return target.type if isinstance(target, torch.device) else target


def _named(target: object, name: str) -> Runtime:
    if name not in target_names():
        raise _unknown(target, name)
    found = runtime(name)
    if not found.is_available():
        other = (
            f"torch.{name}.is_available() is False: install a build of torch for it and a driver"
        )
        raise TargetUnavailableError(
            name, _NO_MAC if name == "mps" else f"{other}, or leave the target out."
        )
    is_out_of_tree = name == torch._C._get_privateuse1_backend_name()
    if is_out_of_tree and not _has_kernel(_ALLOCATING, "PrivateUse1"):
        raise TargetUnavailableError(
            name,
            f"The backend has no kernel of {_ALLOCATING!r}, which allocates: import its extension "
            "in C++ first.",
        )
    return found


def _unknown(target: object, name: str) -> UnknownTargetError:
    known = known_targets()
    lowered = name.strip().lower()
    lowered = OTHER_NAMES.get(lowered, lowered)
    for each in features.all_targets():
        lowered = each.corrected(lowered)
    near = difflib.get_close_matches(lowered, known, n=1)
    # A number behind a known name is right, so only the spelling of the name was wrong.
    exists = without_count(lowered) in known
    meant = near[0] if near else None
    return UnknownTargetError(target, known, lowered if exists else meant)


def shown(target: Runtime) -> str:
    """Return a target as a person writes it: ``simulated:t4`` is one device."""
    return target.target.removesuffix(":1")


def name_of(target: Runtime, options: Options) -> str:
    """Return the name of a target's first device, which a GPU model may give."""
    given = of_device(options.properties, 0)
    name = given.get("name") if given else None
    return name or target.name(0)


def _reported_device(target: Runtime, options: Options) -> torch.device:
    shown = target.supplied.shown_as
    if options.identity == "program":
        shown = "cuda" if options.written_for == "any" else options.written_for
    # torch knows the type of simulated devices only once a scope has registered it.
    return target.device(0) if shown is None else device_of(shown, 0)


class TorchDevice:
    """The device that a scope would choose as its target.

    Args:
        target: The target (see :func:`torchdevice.portable`); None chooses the first available one.

    Attributes:
        device: The ``torch.device`` that tensors would report.
        name: The name of the device, such as a model of CPU or of a simulated GPU.

    Raises:
        UnknownTargetError: ``target`` is not a device type.
        TargetUnavailableError: ``target`` is not available here.
    """

    def __init__(self, target: str | torch.device | None = None):
        found, options = resolve(_options.chosen({"target": target}))
        self.device = _reported_device(found, options)
        self.name = name_of(found, options)

    def __repr__(self) -> str:
        return f"TorchDevice(device={str(self.device)!r}, name={self.name!r})"
