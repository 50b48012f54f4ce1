"""Which device stands in.

The order is: the argument, then ``TORCHDEVICE_TARGET``, then what is there: CUDA, MPS, XPU, a PrivateUse1 backend, CPU.
It is resolved when a scope is entered, never at import.
"""

from __future__ import annotations

import os
import re

import torch

from torchdevice import _active
from torchdevice._runtimes import Runtime, registered, runtime
from torchdevice.errors import TargetUnavailableError, UnknownTargetError

VARIABLE = "TORCHDEVICE_TARGET"

_REMEDIES = {
    "cuda": "torch.cuda.is_available() is False: install a CUDA build of torch and a driver, or leave the target out.",
    "mps": "torch.backends.mps.is_available() is False: it needs macOS on Apple silicon, or leave the target out.",
    "xpu": "torch.xpu.is_available() is False: install an XPU build of torch and a driver, or leave the target out.",
}


SIMULATED = "simulated"

_SIMULATED = re.compile(SIMULATED + r"(?::([a-z]+))?(?::([1-9][0-9]*))?")


def resolve(
    target: str | torch.device | None = None, *, devices: int | None = None, memory: int | None = None
) -> Runtime:
    """Return the runtime of the device that stands in.

    Args:
        target: A device type such as ``"cpu"`` or ``"mps"``, a simulated device such as ``"simulated:cuda:4"``, a
            ``torch.device``, or None to choose.
        devices: How many devices to simulate, if the target does not say.
        memory: Bytes of memory of each simulated device.

    Raises:
        UnknownTargetError: It is no device type of the installed torch.
        TargetUnavailableError: It is one, but not available here.
        ValueError: ``memory`` is given for a device that is not simulated.
    """
    with _active.suspended():
        wanted = target if target is not None else os.environ.get(VARIABLE) or None
        found = _best() if wanted is None else _named(wanted, devices, memory)
        if memory is not None and found.kind != SIMULATED:
            raise ValueError(
                f"memory={memory!r} limits simulated devices, and {found.kind!r} is none. Use a target such as "
                f"'simulated:cuda', or leave memory out."
            )
        return found


def known() -> tuple[str, ...]:
    """Return the names of real devices that :func:`resolve` understands."""
    private = torch._C._get_privateuse1_backend_name()
    conventional = [private] if hasattr(torch, private) and private != SIMULATED else []
    return ("cuda", "mps", "xpu", "cpu", *dict.fromkeys([*registered(), *conventional]))


def _named(wanted: str | torch.device, devices: int | None, memory: int | None) -> Runtime:
    kind = wanted.type if isinstance(wanted, torch.device) else wanted
    if isinstance(kind, str) and (simulated := _SIMULATED.fullmatch(kind)):
        return _simulated(wanted, simulated[1] or "cuda", int(simulated[2] or devices or 1), memory)
    if not isinstance(kind, str) or kind not in known():
        raise UnknownTargetError(wanted, (*known(), SIMULATED))
    found = runtime(kind)
    if not found.is_available():
        raise TargetUnavailableError(kind, _REMEDIES.get(kind, f"torch.{kind}.is_available() is False."))
    return found


def _simulated(wanted: object, profile: str, count: int, memory: int | None) -> Runtime:
    # Imported only where it is asked for: it makes torch read its table of operators.
    from torchdevice.simulation import _profiles, _runtime

    if profile not in _profiles.PROFILES:
        raise UnknownTargetError(wanted, (*known(), *(f"{SIMULATED}:{name}" for name in _profiles.PROFILES)))
    if count > 1 and _profiles.PROFILES[profile].single:
        raise ValueError(f"target={wanted!r} with {count} devices: there is only ever one {profile} device.")
    return _runtime.runtime(profile, count, memory)


def _best() -> Runtime:
    for kind in ("cuda", "mps", "xpu", *known()[4:]):
        if runtime(kind).is_available():
            return runtime(kind)
    return runtime("cpu")
