"""Which device stands in.

The order is: the argument, then ``TORCHDEVICE_TARGET``, then what is there: CUDA, MPS, XPU, a PrivateUse1 backend, CPU.
It is resolved when a scope is entered, never at import.
"""

from __future__ import annotations

import os

import torch

from torchdevice import _active
from torchdevice._runtimes import Runtime, runtime
from torchdevice.errors import TargetUnavailableError, UnknownTargetError

VARIABLE = "TORCHDEVICE_TARGET"

_REMEDIES = {
    "cuda": "torch.cuda.is_available() is False: install a CUDA build of torch and a driver, or leave the target out.",
    "mps": "torch.backends.mps.is_available() is False: it needs macOS on Apple silicon, or leave the target out.",
    "xpu": "torch.xpu.is_available() is False: install an XPU build of torch and a driver, or leave the target out.",
}


def resolve(target: str | torch.device | None = None) -> Runtime:
    """Return the runtime of the device that stands in.

    Args:
        target: A device type such as ``"cpu"`` or ``"mps"``, a ``torch.device``, or None to choose.

    Raises:
        UnknownTargetError: It is no device type of the installed torch.
        TargetUnavailableError: It is one, but not available here.
    """
    with _active.suspended():
        wanted = target if target is not None else os.environ.get(VARIABLE) or None
        return _best() if wanted is None else _named(wanted)


def known() -> tuple[str, ...]:
    """Return the names :func:`resolve` understands."""
    private = torch._C._get_privateuse1_backend_name()
    return ("cuda", "mps", "xpu", "cpu", *([private] if hasattr(torch, private) else []))


def _named(wanted: str | torch.device) -> Runtime:
    kind = wanted.type if isinstance(wanted, torch.device) else wanted
    if not isinstance(kind, str) or kind not in known():
        raise UnknownTargetError(wanted, known())
    found = runtime(kind)
    if not found.is_available():
        raise TargetUnavailableError(kind, _REMEDIES.get(kind, f"torch.{kind}.is_available() is False."))
    return found


def _best() -> Runtime:
    for kind in ("cuda", "mps", "xpu", *known()[4:]):
        if runtime(kind).is_available():
            return runtime(kind)
    return runtime("cpu")
