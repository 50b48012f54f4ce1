"""The device guard, which torch asks for the type of the device, and an error that is on its way meanwhile.

torch asks around every node of ``backward``, also while it unwinds from an error that a hook raised. That error is
pending in Python then, where no Python may run, and an answer that is an error ends the process. So the guard takes the
pending error away, and ``torch_apis/autograd.py`` raises it where the engine returns.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torchdevice.torch_apis.autograd import taken


class _Constants:
    _kind = torch._C._autograd.DeviceType.PrivateUse1
    kind = property(operator.attrgetter("_kind"))
    """Read by a function in C, whose result Python refuses while an error is pending: SystemError, with that cause."""


_constants = _Constants()


def _type() -> Any:
    """Return the type of the device, and take a pending error away."""
    try:
        return _constants.kind
    except SystemError as refusal:
        taken.error = refusal.__cause__
        return _constants._kind


class Guard(torch._C._acc.DeviceGuard):
    """What torch asks for the type of the device."""

    type_ = staticmethod(_type)  # a bound method in its place would be refused itself
