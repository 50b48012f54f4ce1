"""What is a device spelling: parse it and nothing else. Pure functions, no torch state.

A spelling is a whole device argument: ``"cuda"``, ``"cuda:1"``, ``torch.device("mps")``, an int where torch takes one.
Anything else, also a malformed spelling such as ``"cuda:x"``, is not ours, and torch says what is wrong with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

ACCELERATORS = frozenset({"cuda", "mps", "xpu"})
"""The accelerator families a program may have been written for."""

FORCE_CPU = "cpu:-1"
"""The spelling that sends the rest of the active scope to the CPU; torch itself refuses a negative index."""

_STRING = re.compile(r"(cuda|mps|xpu)(?::(0|[1-9][0-9]*))?")


@dataclass(frozen=True)
class Spelling:
    """An accelerator as the program wrote it: the family, and the index where one was written."""

    family: str
    index: int | None

    def __str__(self) -> str:
        return self.family if self.index is None else f"{self.family}:{self.index}"


def parse(value: object) -> Spelling | None:
    """Return what accelerator ``value`` spells, or None where it spells none.

    An int is the index of the program's accelerator, which torch itself reads as its current accelerator type; it is
    reported as family ``"cuda"``. A bool is no index.
    """
    if isinstance(value, str):
        match = _STRING.fullmatch(value)
        return Spelling(match[1], None if match[2] is None else int(match[2])) if match else None
    if isinstance(value, torch.device):
        return Spelling(value.type, value.index) if value.type in ACCELERATORS else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Spelling("cuda", value)
    return None
