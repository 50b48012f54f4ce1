"""Activation by environment: ``TORCHDEVICE=1`` makes ``import torch`` enable a scope.

torch calls :func:`activate` through the ``torch.backends`` entry point at the end of its import. Without the
variable it does nothing.
"""

from __future__ import annotations

import os

VARIABLE = "TORCHDEVICE"
_OFF = ("", "0", "false", "no", "off")


def activate() -> None:
    """Enable a scope if ``TORCHDEVICE`` says so and none is active."""
    if os.environ.get(VARIABLE, "").lower() in _OFF:
        return
    from torchdevice._scope import current, enable

    if current() is None:
        enable()


def propagate_to_children(target: str) -> None:
    """Set the environment so that spawned Python processes activate themselves."""
    os.environ[VARIABLE] = "1"
    os.environ.setdefault("TORCHDEVICE_TARGET", target)
