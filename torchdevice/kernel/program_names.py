"""The accelerators whose names in torch the program may use, and who answers for them."""

from __future__ import annotations

from typing import Any

from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.options import Options


class ProgramNames:
    """The names of a scope.

    Args:
        options: The options of the scope.
        runtime: The target.

    Attributes:
        family: The device type whose names in torch are the target's own, such as ``torch.mps``.
        families: The accelerators whose names and devices are there for the program.
        stood_for: Those of them that are not the target's own.
        is_native: Whether the target is what the program is written for, so that it needs nothing
            from this package.
        answered_by: The context that answers for these names, on a simulated machine; None where
            torch itself does.
    """

    def __init__(self, options: Options, runtime: Runtime):
        self.family = runtime.family
        self.families = frozenset(
            FAMILIES if options.written_for == "any" else (options.written_for,)
        )
        self.stood_for = self.families - {self.family}
        self.is_native = runtime.family == options.written_for
        self.answered_by: Any = runtime.supplied.answered_by
