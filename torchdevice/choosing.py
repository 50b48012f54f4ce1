"""Which device stands in.

The order is: what the call says, then ``TORCHDEVICE_TARGET``, then what is there: CUDA, MPS, XPU, a PrivateUse1
backend, the CPU. The choice is made when a scope is entered, never at import.
"""

from __future__ import annotations

import difflib
import re

import torch

from torchdevice import options as _options
from torchdevice import thread_state
from torchdevice.devices.registry import registered, runtime
from torchdevice.devices.runtime import Runtime
from torchdevice.errors import TargetUnavailableError, UnknownTargetError
from torchdevice.options import Options

_REMEDIES = {
    "cuda": "torch.cuda.is_available() is False: install a CUDA build of torch and a driver, or leave the target out.",
    "mps": "torch.backends.mps.is_available() is False: it needs macOS on Apple silicon, or leave the target out.",
    "xpu": "torch.xpu.is_available() is False: install an XPU build of torch and a driver, or leave the target out.",
}

SIMULATED = "simulated"

_SIMULATED = re.compile(SIMULATED + r"(?::([a-z]+))?(?::([1-9][0-9]*))?")


def resolve(options: Options) -> tuple[Runtime, Options]:
    """Return the runtime of the device that stands in, and the options that apply to it.

    Raises:
        UnknownTargetError: The target is no device type of the installed torch.
        TargetUnavailableError: The target is a device type, but not available here.
        ValueError: An option contradicts the target.
    """
    with thread_state.suspended():
        name = _name_of(options.target)
        simulated = _SIMULATED.fullmatch(name) if name is not None else None
        found = None if simulated else _best() if name is None else _named(options.target, name)
        fitting = options.for_target(
            simulated=simulated is not None,
            shares_host_memory=found is not None and found.shares_host_memory,
            names_count=name is not None and names_count(name),
        )
        if simulated is not None:
            count = int(simulated[2] or fitting.devices or 1)
            found = _simulated(options.target, simulated[1] or "cuda", count, fitting.memory)
        assert found is not None
        return found, fitting


def is_simulated(target: object) -> bool:
    """Return whether a target is asked for by the name of a simulated device."""
    return isinstance(target, str) and _SIMULATED.fullmatch(target) is not None


def names_count(target: str) -> bool:
    """Return whether the name of a target says how many devices there are."""
    found = _SIMULATED.fullmatch(target)
    return found is not None and found[2] is not None


def target_names() -> tuple[str, ...]:
    """Return the names of real devices that :func:`resolve` understands."""
    private = torch._C._get_privateuse1_backend_name()
    conventional = [private] if hasattr(torch, private) and private != SIMULATED else []
    return ("cuda", "mps", "xpu", "cpu", *dict.fromkeys([*registered(), *conventional]))


def _name_of(target: str | torch.device | None) -> str | None:
    return target.type if isinstance(target, torch.device) else target


def _named(target: object, name: str) -> Runtime:
    if name not in target_names():
        raise _unknown(target, name)
    found = runtime(name)
    if not found.is_available():
        raise TargetUnavailableError(name, _REMEDIES.get(name, f"torch.{name}.is_available() is False."))
    return found


def _simulated(target: object, profile: str, count: int, memory: int | str | None) -> Runtime:
    # Imported only where it is asked for: it makes torch read its table of operators.
    from torchdevice.simulation import profiles
    from torchdevice.simulation import runtime as simulated

    if profile not in profiles.PROFILES:
        raise _unknown(target, str(target))
    if count > 1 and profiles.PROFILES[profile].single:
        raise ValueError(f"target={target!r} with {count} devices: there is only ever one {profile} device.")
    return simulated.runtime(profile, count, memory)


_OTHER_NAMES = {"nvidia": "cuda", "metal": "mps", "apple": "mps", "mac": "mps", "intel": "xpu", "gpu": "simulated:cuda"}
"""What people call a target. A GPU that is there is chosen without being named."""


def _unknown(target: object, name: str) -> UnknownTargetError:
    from torchdevice.simulation import profiles

    known = (*target_names(), *(f"{SIMULATED}:{each}" for each in profiles.PROFILES))
    lowered = name.strip().lower()
    lowered = _OTHER_NAMES.get(lowered, lowered)
    near = difflib.get_close_matches(lowered, known, n=1)
    found = _SIMULATED.fullmatch(lowered)
    exists = lowered in known or (found is not None and found[1] in (None, *profiles.PROFILES))
    return UnknownTargetError(target, known, lowered if exists else near[0] if near else None)


def _best() -> Runtime:
    for name in ("cuda", "mps", "xpu", *target_names()[4:]):
        if runtime(name).is_available():
            return runtime(name)
    return runtime("cpu")


class TorchDevice:
    """The device that would stand in for an accelerator here.

    Args:
        target: As for :func:`torchdevice.portable`; None takes the best there is.

    Attributes:
        device: The ``torch.device``.
        name: A name for people.

    Raises:
        UnknownTargetError: ``target`` is no device type.
        TargetUnavailableError: ``target`` is not available here.
    """

    def __init__(self, target: str | torch.device | None = None):
        found, _ = resolve(_options.chosen({"target": target}))
        self.device = found.device(0)
        self.name = found.name(0)

    def __repr__(self) -> str:
        return f"TorchDevice(device={str(self.device)!r}, name={self.name!r})"
