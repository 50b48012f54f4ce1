"""Chooses the target: the device that stands in for the program's accelerator.

The target is that of the call, else that of ``TORCHDEVICE_TARGET``, else the first available of
CUDA, MPS, XPU, a PrivateUse1 backend and the CPU. It is chosen when a scope is entered, never at
import.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from typing import TYPE_CHECKING, Any

import torch

from torchdevice.errors import TargetUnavailableError, UnknownTargetError
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.devices.mps_runtime import MpsRuntime
from torchdevice.kernel.devices.registry import registered, runtime
from torchdevice.kernel.devices.runtime import Runtime, device_of
from torchdevice.kernel.options import of_device
from torchdevice.kernel.python import garbage_collection
from torchdevice.random_numbers.runtimes import with_gpu_numbers
from torchdevice.scope import collected_options as _options
from torchdevice.scope.collected_options import Options

if TYPE_CHECKING:
    from torchdevice.simulation.profiles import Profile

_NO_MAC = (
    "torch.backends.mps.is_available() is False: it needs macOS on Apple silicon. Use "
    "'simulated:mps' for a simulated Mac, or leave the target out."
)

SIMULATED = "simulated"

_SIMULATED_MAC = f"{SIMULATED}:mps", f"{SIMULATED}:mps:1"

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
        simulated = _simulated_target(name) if name is not None else None
        found = None
        if machine is not None:
            found, options = _on_machine(machine, options)
        elif simulated is None:
            found = _best() if name is None else _named(options.target, name)
        facts = _options.Target(
            simulated=simulated is not None,
            shares_host_memory=found is not None and found.shares_host_memory,
            names_count=name is not None and names_count(name),
        )
        fitting = options.for_target(facts)
        if simulated is not None and found is None:
            found = _simulated(simulated[0], fitting)
            if simulated[0] in _SIMULATED_MAC and fitting.identity is None:
                # A Mac's tensors are on mps.
                fitting = dataclasses.replace(fitting, identity="program")
        assert found is not None
        if fitting.random == "cuda" and not found.supplied.is_gpu:
            found = with_gpu_numbers(found)
        return found, fitting


def _best() -> Runtime:
    """Return the runtime of the first accelerator that is available here, else that of the CPU."""
    available = (each for each in target_names() if each != "cpu" and runtime(each).is_available())
    return runtime(next(available, "cpu"))


def machine_of(options: Options) -> Context | None:
    """Return the simulated Mac's context for a scope with these options; None for this machine."""
    name = _name_of(options.target)
    if name in _SIMULATED_MAC and options.written_for != MpsRuntime.device_type:
        from torchdevice.simulation import mac

        own = Options(target=name, written_for="mps", identity="program")
        return mac.standing(own, options.memory)  # type: ignore[arg-type]  # which the option's check has made a number
    return simulated_machine() if name in (None, MpsRuntime.device_type) else None


def simulated_machine() -> Context | None:
    """Return the innermost context of this thread on a simulated Mac; None if there is none."""
    for entry in reversed(thread_state.state.entries):
        context = entry.context
        if context is not None and context.names.answered_by is not None:
            return context.names.answered_by
        if (
            context is not None
            and context.runtime.supplied.location_tag == context.shown_as == MpsRuntime.device_type
        ):
            return context
    return None


def _on_machine(machine: Context, options: Options) -> tuple[Runtime, Options]:
    """Return MPS's runtime on a simulated Mac, or, for MPS programs, the simulated Mac itself."""
    from torchdevice.simulation import mac

    if options.written_for != MpsRuntime.device_type:
        return mac.runtime_on(machine), options
    return machine.runtime, dataclasses.replace(options, identity="program")


def _simulated_target(name: str) -> re.Match[str] | None:
    """Match the name of a simulated device: its profile or model, and the number of devices."""
    if not name.startswith(SIMULATED):
        return None
    from torchdevice.simulation import model_lookup  # only where the target is simulated

    return model_lookup.TARGET.fullmatch(name)


def is_simulated(target: object) -> bool:
    """Return whether a target is the name of a simulated device."""
    return isinstance(target, str) and _simulated_target(target) is not None


def simulated_name(profile: object) -> str | None:
    """Return a profile's target where it must be a simulated device; None if it is none."""
    from torchdevice.simulation import model_lookup

    text = str(profile).strip()
    prefix = "" if text.lower().partition(":")[0] == SIMULATED else f"{SIMULATED}:"
    name = model_lookup.named(prefix + text)
    return name if isinstance(profile, str) and is_simulated(name) else None


def names_count(target: object) -> bool:
    """Return whether a target's name has a number of devices, like ``"simulated:cuda:2"``."""
    if not isinstance(target, str) or not is_simulated(target):
        return False
    from torchdevice.simulation import model_lookup

    return model_lookup.count_of(target) is not None


def without_count(target: str) -> str:
    """Return a target's name without a number of devices: ``"simulated:cuda"``."""
    found = _simulated_target(target)
    return target if found is None or not found[1] else f"{SIMULATED}:{found[1]}"


def simulated_profile(target: str, devices: int | None = None) -> tuple[Profile, int]:
    """Return the profile that the name of a simulated device means, and the number of devices.

    Args:
        target: The name.
        devices: The number where the name contains none; None for one device.

    Raises:
        UnknownTargetError: It is not such a name.
        ValueError: The profile has one device and more are asked for, or more than torch can
            number.
    """
    from torchdevice.simulation import model_lookup, profiles

    found = _simulated_target(target)
    profile = profiles.find(found[1] or "cuda") if found else None
    if found is None or profile is None:
        raise _unknown(target, target)
    count = model_lookup.count_of(target) or devices or 1
    if count > _options.MOST_DEVICES:
        raise ValueError(
            f"target={target!r} cannot have {count} devices: torch numbers {_options.MOST_DEVICES} "
            "at most. Use fewer."
        )
    if profile.single and count > 1:
        raise ValueError(
            f"target={target!r} cannot have {count} devices: the profile has one. Use one device."
        )
    return profile, count


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
    if is_simulated(target):
        profile, count = simulated_profile(str(target))
        # A program for Macs knows of one device.
        has_few = count < ranks and not (profile.single and written_for == MpsRuntime.device_type)
    elif target is None or target in target_names():
        found = _best() if target is None else runtime(str(target))
        has_few = found.device_count() < ranks
    else:  # an error when the scope begins
        has_few = False
    return {"devices": ranks} if has_few else {}


def target_names() -> tuple[str, ...]:
    """Return the names of real devices that :func:`resolve` understands."""
    private = torch._C._get_privateuse1_backend_name()
    conventional = [private] if hasattr(torch, private) and private != SIMULATED else []
    return (*FAMILIES, "cpu", *dict.fromkeys([*registered(), *conventional]))


def known_targets() -> tuple[str, ...]:
    """Return all possible targets' names, available or not: real ones, profiles and models."""
    from torchdevice.simulation import model_lookup, profiles

    return (
        *target_names(),
        *(f"{SIMULATED}:{each}" for each in (*profiles.PROFILES, *model_lookup.MODELS)),
    )


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


def _simulated(target: str, options: Options) -> Runtime:
    # Imported only where a program simulates, because the import reads torch's table of operators,
    # which takes time.
    with garbage_collection.paused():
        from torchdevice.simulation import simulated_runtime as simulated

    profile, count = simulated_profile(target, options.devices)
    return simulated.runtime(profile, count, options.memory, options.context or 0)


_OTHER_NAMES = {
    "nvidia": "cuda",
    "metal": "mps",
    "apple": "mps",
    "mac": "mps",
    "intel": "xpu",
    "gpu": "simulated:cuda",
}
"""Other names of targets. A GPU that is there is chosen without a name."""


def _unknown(target: object, name: str) -> UnknownTargetError:
    known = known_targets()
    lowered = name.strip().lower()
    # `simulate("gpu")` means a simulated device in any case.
    before = f"{SIMULATED}:" if lowered.startswith(f"{SIMULATED}:") else ""
    bare = lowered.removeprefix(before)
    lowered = before + _OTHER_NAMES.get(bare, bare).removeprefix(before)
    near = difflib.get_close_matches(lowered, known, n=1)
    # A number of real devices is not chosen by the target.
    if re.fullmatch(r"(cuda|mps):[0-9]+", lowered):
        lowered = f"{SIMULATED}:{lowered}"
    found = _simulated_target(lowered)
    # A number behind a known name is right, so only the spelling of the name was wrong.
    exists = lowered in known or (
        found is not None and f"{SIMULATED}:{found[1] or 'cuda'}" in known
    )
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
