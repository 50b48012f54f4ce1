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
    """The value is plausible or the behaviour is coarser. Each line of the program is reported
    once.
    """
    DOWNCAST = "downcast"
    """The values are kept or computed in another dtype than the program asked for."""
    FELL_BACK = "fell back"
    """The target lacks the operator, which ran on the CPU for that call."""
    INERT = "inert"
    """The call is a hint that has no effect on the target."""
    UNSUPPORTED = "unsupported"
    """The call raises an error that names a remedy."""

    @property
    def changes_numbers(self) -> bool:
        """Whether it may change the program's numbers. A strict scope refuses such calls."""
        return self in (Fidelity.APPROXIMATE, Fidelity.DOWNCAST, Fidelity.FELL_BACK)
