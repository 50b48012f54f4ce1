"""The names of simulated devices as targets, and the runtimes that they mean.

A scope imports this module where its target's name begins with ``simulated``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import OTHER_NAMES
from torchdevice.kernel.devices.mps_runtime import MpsRuntime
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.feature import Targets
from torchdevice.kernel.options import MOST_DEVICES, Record, Target
from torchdevice.kernel.python import garbage_collection
from torchdevice.simulation import model_lookup, profiles
from torchdevice.simulation.model_lookup import SIMULATED, SIMULATED_MAC


class SimulatedTargets(Targets):
    """Answers for names such as ``"simulated:cuda:2"``."""

    def known(self) -> Iterable[str]:
        names = (*profiles.PROFILES, *model_lookup.MODELS)
        return (f"{SIMULATED}:{each}" for each in names)

    def answers(self, name: str) -> bool:
        return model_lookup.TARGET.fullmatch(name) is not None

    def exists(self, name: str) -> bool:
        return _profile(name) is not None

    def without_count(self, name: str) -> str:
        found = model_lookup.TARGET.fullmatch(name)
        return name if found is None or not found[1] else f"{SIMULATED}:{found[1]}"

    def facts(self, name: str) -> Target:
        count = model_lookup.count_of(name)
        return Target(simulated=True, names_count=count is not None)

    def corrected(self, name: str) -> str:
        before = f"{SIMULATED}:"
        bare = name.removeprefix(before)
        if bare == "gpu":
            return f"{SIMULATED}:cuda"
        # A number of real devices is not chosen by the target.
        if re.fullmatch(r"(cuda|mps):[1-9][0-9]*", name):
            return before + name
        return before + OTHER_NAMES.get(bare, bare) if name.startswith(before) else name

    def has_too_few(self, name: str, ranks: int, written_for: object) -> bool:
        found, count = profile(name)
        # A program for Macs knows of one device.
        return count < ranks and not (found.single and written_for == MpsRuntime.device_type)

    def runtime(self, name: str, options: Record) -> tuple[Runtime, Record]:
        # Imported only where a program simulates, because the import reads torch's table of
        # operators, which takes time.
        with garbage_collection.paused():
            from torchdevice.simulation import simulated_runtime as simulated

        found, count = profile(name, options.devices)
        if name in SIMULATED_MAC and options.identity is None:
            # A Mac's tensors are on mps.
            options = dataclasses.replace(options, identity="program")
        return simulated.runtime(found, count, options.memory, options.context or 0), options

    def machine(self, name: str, options: Any) -> Context | None:
        if name not in SIMULATED_MAC or options.written_for == MpsRuntime.device_type:
            return None
        from torchdevice.simulation import mac

        own = type(options)(target=name, written_for="mps", identity="program")
        return mac.standing(own, options.memory)

    def runtime_on(self, machine: Context, options: Record) -> tuple[Runtime, Record]:
        """Return MPS's runtime on a simulated Mac, or the simulated Mac itself for MPS programs."""
        from torchdevice.simulation import mac

        if options.written_for != MpsRuntime.device_type:
            return mac.runtime_on(machine), options
        return machine.runtime, dataclasses.replace(options, identity="program")


TARGETS = SimulatedTargets()


def is_simulated(target: object) -> bool:
    """Return whether a target is the name of a simulated device."""
    return isinstance(target, str) and TARGETS.answers(target)


def named(text: object) -> str | None:
    """Return a profile's target where it must be a simulated device; None if it is none."""
    bare = str(text).strip()
    prefix = "" if bare.lower().partition(":")[0] == SIMULATED else f"{SIMULATED}:"
    name = model_lookup.named(prefix + bare)
    return name if isinstance(text, str) and is_simulated(name) else None


def profile(target: str, devices: int | None = None) -> tuple[profiles.Profile, int]:
    """Return the profile that the name of a simulated device means, and the number of devices.

    Args:
        target: The name, of which ``TARGETS.exists``.
        devices: The number where the name contains none; None for one device.

    Raises:
        ValueError: The profile has one device and more are asked for, or more than torch can
            number.
    """
    found = _profile(target)
    assert found is not None, "a name that exists has a profile"
    count = model_lookup.count_of(target) or devices or 1
    if count > MOST_DEVICES:
        raise ValueError(
            f"target={target!r} cannot have {count} devices: torch numbers {MOST_DEVICES} at most. "
            "Use fewer."
        )
    if found.single and count > 1:
        raise ValueError(
            f"target={target!r} cannot have {count} devices: the profile has one. Use one device."
        )
    return found, count


def _profile(target: str) -> profiles.Profile | None:
    parts = model_lookup.TARGET.fullmatch(target)
    return None if parts is None else profiles.find(parts[1] or "cuda")
