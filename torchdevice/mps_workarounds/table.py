"""The operators that MPS is known to compute wrongly, which ``faults.json`` lists.

Numbers are those of issues of https://github.com/pytorch/pytorch. A version is given where the issue, or what is known
of it, says which one has the fault. Everywhere else the guard is always on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchdevice.foundation import data_files
from torchdevice.mps_workarounds import guards

Version = tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """A kernel that gives wrong results.

    Attributes:
        operators: The operators, with overload.
        issues: The issues that report it.
        what: What is wrong, for the report and the documentation.
        guard: What is done instead.
        macos_before: The first version of macOS without the fault; None where none is known.
        torch_before: The first version of torch without the fault; None where none is known.
    """

    operators: tuple[str, ...]
    issues: tuple[int, ...]
    what: str
    guard: guards.Guard
    macos_before: Version | None = None
    torch_before: Version | None = None

    def is_in(self, torch_version: Version, macos_version: Version | None) -> bool:
        """Return whether versions of torch and of macOS may have the fault; an unknown version may."""
        if self.torch_before is not None and torch_version >= self.torch_before:
            return False
        return self.macos_before is None or macos_version is None or macos_version < self.macos_before


def _fault(row: dict[str, Any]) -> Fault:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Fault(**{**values, "guard": getattr(guards, row["guard"])})


FAULTS = tuple(map(_fault, data_files.read(__file__, "faults.json")))
"""Every known fault with a guard."""
