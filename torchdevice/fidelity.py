"""How close a supplied name or a rewritten call comes to what CUDA does."""

from __future__ import annotations

import enum


class Fidelity(enum.Enum):
    """How close a supplied name or a rewritten call comes to what CUDA does."""

    EXACT = "exact"
    """The name has the same meaning on the target."""
    DECLARED = "declared"
    """The value is a documented constant of the stand-in. Nothing was measured."""
    APPROXIMATE = "approximate"
    """The value is plausible or the behaviour is coarser. Each line of the program is reported once."""
    INERT = "inert"
    """The call is a hint that has no effect on the target."""
    UNSUPPORTED = "unsupported"
    """The call raises an error that names a remedy."""
