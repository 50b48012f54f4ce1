"""Activation by environment: ``TORCHDEVICE=1`` makes ``import torch`` enable a scope.

torch calls :func:`activate` through the ``torch.backends`` entry point at the end of its import. Without the
variable it does nothing.
"""

from __future__ import annotations

from torchdevice import _propagation
from torchdevice._scope import current, enable


def activate() -> None:
    """Enable the scope that the environment asks for, if any, unless one is active."""
    options = _propagation.from_parent()
    if options is not None and current() is None:
        enable(**options)
